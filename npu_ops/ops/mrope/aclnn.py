"""Runs mrope with torch_npu's `npu_mrope`, for servers: cos and sin come from one cache.

Its limits are from torch_npu's documentation. Positions on a device are not checked. For a position
outside the cache this operator reads memory outside the cache; npu-ops's own kernels return NaN.
"""

from __future__ import annotations

import functools

import torch

from npu_ops.core import check
from npu_ops.core.library import dtype_why_not, torch_npu_why_not

_SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12])
# The layouts of npu-ops, and their names in torch_npu.
_CACHE_MODES = {"chunked": "default", "interleaved": "interleave"}
_MODES = {"half": "half", "interleaved": "interleave"}


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    q, k, cos, sin = arguments[:4]
    if len({x.dtype for x in (q, k, cos, sin)}) > 1:
        got = ", ".join(check.short(x.dtype) for x in (q, k, cos, sin))
        return f"q, k, cos and sin are {got}, the vendor's operator takes one dtype"
    if arguments.positions is None or arguments.layout != "TND" or not _one_cache(cos, sin):
        return "the vendor's operator takes packed tokens, positions and one cache with cos and sin"
    if arguments.inverse or not k.numel():
        return "the vendor's operator rotates q and k, and has no inverse"
    if list(arguments.mrope_section) not in _SECTIONS:
        needs = ", ".join(map(str, _SECTIONS))
        return (
            f"mrope_section is {list(arguments.mrope_section)}, the vendor's operator takes {needs}"
        )
    multiple = 16 if q.dtype == torch.float32 else 32
    if q.shape[-1] != k.shape[-1] or q.shape[-1] % multiple or arguments.rotary_dim % multiple:
        return f"the vendor's operator takes head and rotary dimensions in multiples of {multiple}"
    return dtype_why_not(q) or _missing()


def _one_cache(cos, sin) -> bool:
    """Return whether cos and sin are the left and right half of one cache's columns."""
    width = cos.shape[-1]
    return (
        cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and cos.stride(-1) == 1
        and cos.stride(-2) >= 2 * width
        and torch._C._is_alias_of(cos, sin)
        and sin.storage_offset() == cos.storage_offset() + width
    )


_missing = functools.partial(
    torch_npu_why_not, "npu_mrope", "mrope_section", "rotary_mode", "cache_mode"
)


def mrope(
    q, k, cos, sin, positions, mrope_section, section_layout, layout, pair_layout, inverse,
    rotary_dim, q_out, k_out,
) -> None:  # fmt: skip
    """Write q_out and k_out; they may be q and k."""
    rows = cos[0, 0]
    cache = rows.as_strided((rows.shape[0], 2 * rows.shape[1]), rows.stride())
    found = torch.ops.npu.npu_mrope(
        positions.flatten(1).contiguous(), q.flatten(1).contiguous(), k.flatten(1).contiguous(),
        cache.contiguous(), q.shape[-1], mrope_section=list(mrope_section),
        rotary_mode=_MODES[pair_layout], cache_mode=_CACHE_MODES[section_layout],
    )  # fmt: skip
    for out, value in zip((q_out, k_out), found, strict=True):
        out.copy_(value.view(out.shape))
