"""Shared by chunk_gated_delta_rule and chunk_kda: checks whether Triton kernels support a call."""

from __future__ import annotations

from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK_SIZES, TOKEN

_WIDEST = 256  # K and V
_TOKENS = 1 << 22  # packed tokens; a kernel counts them in fp32


def triton_why_not(arguments) -> str | None:
    """Return None, or a sentence on why the kernels do not support the arguments."""
    for name, x in (("K", arguments.q), ("V", arguments.v)):
        if x.shape[-1] > _WIDEST:
            return f"{name} is {x.shape[-1]}, above {_WIDEST}"
    if arguments.chunk_size not in (TOKEN, *CHUNK_SIZES):
        return f"it has no kernel for chunks of {arguments.chunk_size}"
    tokens = arguments.q.shape[1]
    if arguments.cu_seqlens is not None and tokens >= _TOKENS:
        return f"it supports fewer than {_TOKENS} packed tokens, not {tokens}"
    return None
