"""Argument checks of attention.

`call` is a NamedTuple of the public function's arguments, in one form (see
`arguments.in_one_form`).
"""

from __future__ import annotations

import math

import torch

from npu_ops.core import check, indices, library
from npu_ops.ops.attention.arguments import UNLIMITED, keys_of
from npu_ops.ops.attention.reference import compute_dtype


def check_call(call) -> None:
    """Check the arguments of `attention`."""
    _check_heads(call.q, call.k, call.v, paged=call.block_table is not None)
    check.one_of("causal_alignment", call.causal_alignment, ("bottom_right", "top_left"))
    _check_window(call.window)
    _check_what_goes_together(call)
    _check_bias_and_mask(call)
    _check_sinks(call)
    _check_all_lengths(call)
    _check_numbers(call)


def _check_heads(q, k, v, paged: bool) -> None:
    """Check q, k and v, in normal form, against each other."""
    for name, x in (("k", k), ("v", v)):
        check.same_dtype(name, x, "q", q)
        check.same_device(name, x, "q", q)
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} heads, needs a divisor of q's {q.shape[1]}")
    if k.shape[3] != q.shape[3] or not q.shape[3]:
        raise ValueError(f"k: got head dimension {k.shape[3]}, needs q's {q.shape[3]}")
    if v.shape[:3] != k.shape[:3] or not v.shape[3]:
        raise check.shape("v", v, f"k's {list(k.shape[:3])} (batch, heads, tokens) and a dimension")
    if not paged and k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got batch {k.shape[0]}, needs q's {q.shape[0]}")


def _check_window(window) -> None:
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    if window is None or (pair and all(isinstance(n, int) and n >= UNLIMITED for n in window)):
        return
    raise ValueError(
        f"window: got {window!r}, needs (left, right), keys before and after the diagonal, -1 for "
        "all"
    )


def _check_what_goes_together(call) -> None:
    """Check lengths and blocks against the layout, and masks against the options they exclude."""
    packed, paged = call.layout == "TND", call.block_table is not None
    if packed and call.cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q: got None, needs the starts of the sequences for layout TND")
    if not packed and call.cu_seqlens_q is not None:
        raise ValueError(f"layout: got {call.layout!r} with cu_seqlens_q, needs 'TND'")
    if call.cu_seqlens_k is not None and (paged or call.cu_seqlens_q is None):
        raise ValueError("cu_seqlens_k: got a value, needs cu_seqlens_q, and no block_table")
    if paged and call.seqlens_k is None:
        raise ValueError("seqlens_k: got None, needs the number of keys of each sequence")
    if call.seqlens_k is not None and packed and not paged:
        raise ValueError("seqlens_k: got a value with packed keys, needs cu_seqlens_k instead")
    for name in ("attn_mask", "bias"):
        if getattr(call, name) is not None and (packed or paged):
            raise ValueError(f"{name}: got a value with packed or paged tokens, needs None")
    if call.attn_mask is not None and (call.is_causal or call.window is not None):
        name = "is_causal" if call.is_causal else "window"
        raise ValueError(f"{name}: got a value with attn_mask, needs only one of the two")


def _check_bias_and_mask(call) -> None:
    if call.bias is not None:
        _check_pairs("bias", call.bias, call.q, call.k)
        check.dtype("bias", call.bias, call.q.dtype, compute_dtype(call.q))
    mask = call.attn_mask
    if mask is None:
        return
    _check_pairs("attn_mask", mask, call.q, call.k)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: got {check.short(mask.dtype)}, needs bool, True where a key takes part "
            "(pass an additive mask as bias)"
        )


def _check_pairs(name: str, x, q, k) -> None:
    """Check a mask or bias of 2 or 4 dimensions; 1 or 3 dimensions would be ambiguous."""
    check.tensor(name, x)
    check.same_device(name, x, "q", q)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if x.dim() == 2:
        fits = tuple(x.shape) == full[2:]
    else:
        fits = x.dim() == 4 and all(n in (1, m) for n, m in zip(x.shape, full, strict=True))
    if not fits:
        raise check.shape(
            name,
            x,
            f"{list(full[2:])}, or {list(full)} where any size may be 1 (not 1 or 3 dimensions)",
        )


def _check_sinks(call) -> None:
    sinks, q = call.sinks, call.q
    if sinks is None:
        return
    check.floating("sinks", sinks)
    check.same_device("sinks", sinks, "q", q)
    if sinks.shape != q.shape[1:2]:
        raise check.shape("sinks", sinks, f"[{q.shape[1]}], one for each head of q")


def _check_all_lengths(call) -> None:
    """Check lengths and blocks against the tokens and each other."""
    q, starts_q, starts_k = call.q, call.cu_seqlens_q, call.cu_seqlens_k
    sequences = q.shape[0]
    if starts_q is not None:
        _check_lengths("cu_seqlens_q", starts_q, q, None, q.shape[2])
        sequences = starts_q.numel() - 1
    if starts_k is not None and (starts_k is not starts_q or q.shape[2] != call.k.shape[2]):
        _check_lengths("cu_seqlens_k", starts_k, q, None, call.k.shape[2])
        if starts_k.numel() != sequences + 1:
            raise check.shape("cu_seqlens_k", starts_k, f"[{sequences + 1}], as for q")
    if call.block_table is not None:
        _check_blocks(call, sequences)
    if call.seqlens_k is not None:
        _check_lengths("seqlens_k", call.seqlens_k, q, sequences)
        _check_longest("seqlens_k", keys_of(call), call.seqlens_k)
    _check_lengths_on_host(call, sequences)
    for name, starts in (("max_seqlen_q", starts_q), ("max_seqlen_k", starts_k)):
        given = getattr(call, name)
        if given is not None and starts is None:
            raise ValueError(f"{name}: got {given!r}, needs packed sequences")
        if given is not None:
            _check_longest(name, given, starts.diff())


def _check_lengths_on_host(call, sequences: int) -> None:
    """Check that copies of lengths come with their originals and have the same form."""
    starts_q, starts_k = call.cu_seqlens_cpu
    # Skip duplicates: a copy may be its original, which is checked already, or serve q and k.
    for_both = starts_k is starts_q and call.q.shape[2] == keys_of(call)
    if starts_q is call.cu_seqlens_q:
        starts_q = None
    if call.cu_seqlens_k is None or for_both or starts_k is call.cu_seqlens_k:
        starts_k = None
    for name, x, total, original in (
        ("cu_seqlens_cpu", starts_q, call.q.shape[2], call.cu_seqlens_q),
        ("cu_seqlens_cpu", starts_k, keys_of(call), call.cu_seqlens_k),
        ("seqlens_k_cpu", call.seqlens_k_cpu, None, call.seqlens_k),
    ):
        if x is not None and (call.seqlens_k if total is None else call.cu_seqlens_q) is None:
            raise ValueError(f"{name}: got a value, needs {name.removesuffix('_cpu')} too")
        if x is not None:
            _check_lengths(name, x, None, sequences + (total is not None), total)
            _check_copy(name, x, original)


def _check_copy(name: str, x, original) -> None:
    """Raise ValueError if lengths in host memory differ from the tensor that they are a copy of.

    A tensor on a device is not read, so its copy is not checked.
    """
    if library.readable(original) and library.readable(x) and original.tolist() != x.tolist():
        needs = f"the values of {name.removesuffix('_cpu')}, {original.tolist()}"
        raise ValueError(f"{name}: got {x.tolist()}, needs {needs}")


def _check_blocks(call, sequences: int) -> None:
    table = call.block_table
    check.tensor("block_table", table)
    check.dtype("block_table", table, torch.int32)
    check.same_device("block_table", table, "q", call.q)
    if table.dim() != 2 or table.shape[0] != sequences:
        raise check.shape("block_table", table, f"[{sequences}, blocks]")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
        raise ValueError(
            "block_table: got a tensor with inputs that require a gradient, needs no_grad"
        )


def _check_lengths(name: str, x, q, entries: int | None, total: int | None = None) -> None:
    """Check sequence lengths or, if `total` is given, cu_seqlens that end at or before `total`.

    Values are checked only if reading them waits for no device and breaks no trace.
    """
    check.indices(name, x)
    if q is not None:
        check.same_device(name, x, "q", q)
    if x.dim() != 1 or (x.numel() < 2 if entries is None else x.numel() != entries):
        raise check.shape(name, x, "[sequences + 1]" if entries is None else f"[{entries}]")
    if library.readable(x):
        _check_values(name, x, total)


def _check_values(name, x, total) -> None:
    if total is None:
        if x.numel() and x.min() < 0:
            raise ValueError(f"{name}: got {int(x.min())}, needs lengths that are not negative")
    else:
        indices.check_starts(name, x, total)


def _check_longest(name: str, given, lengths) -> None:
    """Check an upper bound of lengths, against the lengths if they can be read."""
    if not isinstance(given, int) or given < 0:
        raise ValueError(f"{name}: got {given!r}, needs a number of tokens")
    if library.readable(lengths) and lengths.numel():
        if int(lengths.max()) > given:
            raise ValueError(f"{name}: got {given}, needs {int(lengths.max())} or more")


def _check_numbers(call) -> None:
    check.scale("scale", call.scale)
    if call.softcap is not None:
        needs = "a finite number above 0, or None"
        if not call.softcap:
            raise ValueError(f"softcap: got {call.softcap!r}, needs {needs}")
        check.number("softcap", call.softcap, 0, math.inf, needs)
    generator, device = call.generator, call.q.device
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}, needs a torch.Generator")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator: got device {generator.device}, needs q's {device}")
    check.number("dropout_p", call.dropout_p, 0, 1, "0 <= dropout_p < 1")
