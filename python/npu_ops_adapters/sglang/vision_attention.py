"""Attention of a vision tower: images packed one after the other, each seeing itself alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.core.memo import TensorCache
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_MODULE = "sglang.srt.layers.attention.vision"
_on_host = TensorCache()


def patches() -> Iterable[Patch]:
    """`ascend_attn`, which SGLang takes on NPUs, in its table of backends."""
    yield Patch(
        target=f"{_MODULE}:QKV_BACKEND_IMPL.ascend_attn",
        op="attention",
        make=_replace,
        why="it runs on NPUs alone, and dropped masks before 0.5.20",
        signatures=(),  # a class
        versions=functions.VERSIONS,
        remove_when="SGLang lets a backend of its vision towers be registered",
        rebind=False,
    )


def _replace(original: type) -> type:
    class NpuOpsVisionAttention(torch.nn.Module):
        """Attention by `npu_ops.attention`; what is not ours by SGLang's own class."""

        def __init__(self, **settings):
            super().__init__()
            self._settings, self._theirs = settings, []

        def forward(self, q, k, v, cu_seqlens, bsz, seq_len, **options):
            try:
                return ours(self._settings, q, k, v, cu_seqlens, bsz, seq_len, **options)
            except (TypeError, ValueError) as reason:
                functions.fell_back("ascend_attn", reason)
            theirs = self._made(original)
            return theirs(q=q, k=k, v=v, cu_seqlens=cu_seqlens, bsz=bsz, seq_len=seq_len, **options)

        def _made(self, original):
            """SGLang's; its own is for NPUs alone."""
            if not self._theirs:  # a list: no submodule, so no weights are looked for
                chosen = original if functions.on_npu() else _module().VisionSdpaAttention
                self._theirs.append(chosen(**self._settings))
            return self._theirs[0]

    return NpuOpsVisionAttention


def ours(
    settings, q, k, v, cu_seqlens, bsz, seq_len, softmax_scale=None, forward_metadata=None,
    attention_mask=None, output_ws=None, **options,
):  # fmt: skip
    """q, k and v are `[T, heads, D]`. output_ws is where a captured graph wants the result."""
    functions.check_device(q)
    functions.refuse(attention_mask=attention_mask, output_ws=output_ws)
    if settings.get("softmax_in_single_precision") and q.dtype != torch.float32:
        raise ValueError("softmax_in_single_precision: got it, and scores of another precision")
    if forward_metadata is not None:
        starts = forward_metadata.cu_seqlens
    else:
        starts = _module().resolve_seqlens(cu_seqlens, bsz, seq_len, device=q.device)
    on_host = _on_host.get(starts, "list", starts.tolist)
    if on_host[-1] != q.shape[0]:
        raise ValueError(f"cu_seqlens: got an end of {on_host[-1]}, needs {q.shape[0]} tokens")
    scale = settings.get("softmax_scale") if softmax_scale is None else softmax_scale
    return npu_ops.attention(
        q,
        k,
        v,
        layout="TND",
        cu_seqlens_q=starts.to(q.device, torch.int32),
        cu_seqlens_cpu=on_host,
        max_seqlen_q=max(b - a for a, b in zip(on_host, on_host[1:], strict=False)),
        scale=scale,
    )


def _module():
    return sys.modules[_MODULE]
