"""Replaces the vision towers' backend `ascend_attn`: packed images, each attending to itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.core.hardware import is_captured
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_MODULE = "sglang.srt.layers.attention.vision"


def patches() -> Iterable[Patch]:
    """Patch `ascend_attn`, which SGLang uses on NPUs, in its table of backends."""
    yield Patch(
        target=f"{_MODULE}:QKV_BACKEND_IMPL.ascend_attn",
        op="attention",
        make=_replace,
        why="it runs only on NPUs, and ignored masks before 0.5.20",
        signatures=(),  # a class
        versions=functions.VERSIONS,
        remove_when="SGLang accepts a registered backend for its vision towers",
        rebind=False,
    )


def _replace(original: type) -> type:
    class NpuOpsVisionAttention(torch.nn.Module):
        """Attention by `npu_ops.attention`; SGLang's own class runs unsupported calls."""

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
            """Return an instance of the replaced class; without an NPU, of SGLang's SDPA class."""
            if not self._theirs:  # in a list, so that it is no submodule and loads no weights
                chosen = original if functions.on_npu() else _module().VisionSdpaAttention
                self._theirs.append(chosen(**self._settings))
            return self._theirs[0]

    return NpuOpsVisionAttention


def ours(
    settings, q, k, v, cu_seqlens, bsz, seq_len, softmax_scale=None, forward_metadata=None,
    attention_mask=None, output_ws=None, **options,
):  # fmt: skip
    """Return attention of packed images, `[T, heads, D]`. q, k and v are `[T, heads, D]`.

    output_ws, the output buffer of a captured graph, must be None.
    """
    functions.check_device(q)
    functions.refuse(attention_mask=attention_mask, output_ws=output_ws)
    if settings.get("softmax_in_single_precision") and q.dtype != torch.float32:
        raise ValueError("softmax_in_single_precision: got True, needs q in float32")
    if forward_metadata is not None:
        starts = forward_metadata.cu_seqlens
    else:
        starts = _module().resolve_seqlens(cu_seqlens, bsz, seq_len, device=q.device)
    scale = settings.get("softmax_scale") if softmax_scale is None else softmax_scale
    lengths = {} if is_captured(q.device) else _on_host(starts, q.shape[0])
    return npu_ops.attention(
        q,
        k,
        v,
        layout="TND",
        cu_seqlens_q=starts.to(q.device, torch.int32),
        scale=scale,
        **lengths,
    )


def _on_host(starts, tokens: int) -> dict:
    """Copy the lengths to the host, for operators that take them as lists.

    Each layer copies them again, because their memory may change between layers. A captured graph
    would freeze the lists, so there they are not passed.
    """
    starts = starts.tolist()
    if starts[-1] != tokens:
        raise ValueError(f"cu_seqlens: got an end of {starts[-1]}, needs {tokens} tokens")
    longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    return {"cu_seqlens_cpu": starts, "max_seqlen_q": longest}


def _module():
    return sys.modules[_MODULE]
