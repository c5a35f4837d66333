"""Allocation of cache slots for new tokens, in torch."""

from sgl_kernel_npu import absent as __getattr__  # noqa: F401


class _Kernel:
    def __getitem__(self, grid):
        return self._launch

    def _launch(
        self, prefix_lens, seq_lens, last_loc, free_pages, out, _, page_size, __, *more, **options
    ):
        from sglang.srt.mem_cache.allocator import alloc_extend_naive

        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)


alloc_extend_kernel = _Kernel()
