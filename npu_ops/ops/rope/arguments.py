"""Shared by rope, mrope and qk_norm_rope: checks and converts public arguments."""

from __future__ import annotations

import torch

from npu_ops.core import check, indices, library

LAYOUTS = ("BSND", "SBND", "BNSD", "TND")
PAIR_LAYOUTS = ("half", "interleaved")
# Modes of torch_npu's npu_rotary_mul that are no name of a pair layout, and how to express them.
_MODES = {
    "quarter": "call with 'half' for each half of a head and of the tables",
    "interleave": "which is 'interleaved'",
    "interleave-half": "call with 'interleaved', then put even elements before odd ones",
}


def check_pair_layout(value) -> None:
    """Raise ValueError unless `value` is a pair layout.

    If it is a rotary mode of torch_npu, the error says how to express this mode.
    """
    mode = _MODES.get(value) if isinstance(value, str) else None
    if mode:
        needs = f"'half' or 'interleaved' (torch_npu's mode: {mode})"
        raise ValueError(f"pair_layout: got {value!r}, needs {needs}")
    check.one_of("pair_layout", value, PAIR_LAYOUTS)


def resolve_layout(q, layout: str | None, unsqueeze_dim: int) -> str:
    """Return `layout`, or derive it from Hugging Face's `unsqueeze_dim`: 1 is BNSD, 2 is BSND."""
    check.floating("q", q)
    if layout is None:
        if q.dim() == 3:
            return "TND"
        check.one_of("unsqueeze_dim", unsqueeze_dim, (1, 2))
        layout = "BNSD" if unsqueeze_dim == 1 else "BSND"
    check.one_of("layout", layout, LAYOUTS)
    if q.dim() != len(layout):
        raise check.shape("q", q, f"{len(layout)} dimensions for layout {layout}")
    return layout


def size(x, layout: str, axis: str) -> int:
    """Return the size of `x` along an axis of its layout; TND has a batch of one."""
    if layout == "TND" and axis == "B":
        return 1
    return x.shape[layout.index("T" if layout == "TND" and axis == "S" else axis)]


def check_heads(q, k, layout: str) -> None:
    """Check that k has q's dtype, device and, except for the number of heads, shape."""
    if k is None:
        return
    check.floating("k", k)
    check.same_device("k", k, "q", q)
    check.same_dtype("k", k, "q", q)
    heads = layout.index("N")
    if k.dim() != q.dim() or _without(heads, k.shape) != _without(heads, q.shape):
        raise check.shape("k", k, f"q's shape {list(q.shape)} except for the heads ({layout})")


def _without(i: int, shape) -> list[int]:
    return [*shape[:i], *shape[i + 1 :]]


def k_or_no_heads(q, k, layout: str):
    """Return k; if k is None, an empty tensor with no heads, which costs nothing to rotate.

    The empty tensor has its own memory, because an output must not share memory.
    """
    if k is not None:
        return k
    heads = layout.index("N")
    return q.new_empty([0 if i == heads else n for i, n in enumerate(q.shape)])


def resolve_rotary_dim(rotary_dim, width: int, head_dim: int) -> int:
    """Return how many elements of a head to rotate: `rotary_dim`, or else the width of the table.

    A table half as wide as the head is ambiguous: it may be a full-width table for half of each
    head, or a half-width table for the whole head. Then the caller must pass rotary_dim.
    """
    if rotary_dim is None:
        if 2 * width == head_dim:
            raise ValueError(
                f"rotary_dim: got None, needs {width} (cos is full-width, half of each head is "
                f"rotated) or {head_dim} (cos is half-width), for a table of width {width} and "
                f"head_dim {head_dim} may mean either"
            )
        rotary_dim = width
    if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"rotary_dim: got {rotary_dim!r}, needs an even number up to head_dim {head_dim}"
        )
    if width not in (rotary_dim, rotary_dim // 2):
        raise ValueError(f"cos: got width {width}, needs rotary_dim {rotary_dim} or half of it")
    return rotary_dim


def check_table(name: str, table, q, of: str = "q") -> None:
    """Check a table's dtype and device, and that it needs no gradient. of: q's name in errors."""
    check.floating(name, table)
    check.same_device(name, table, of, q)
    if table.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires a gradient, needs one that does not")


def check_tables(cos, sin, q, of: str = "q") -> None:
    """Check cos and sin, except for their leading dimensions."""
    check_table("cos", cos, q, of)
    check_table("sin", sin, q, of)
    if sin.shape != cos.shape:
        raise check.shape("sin", sin, f"cos's shape {list(cos.shape)}")
    check.same_dtype("sin", sin, "cos", cos)


def check_table_size(name, table, rows_dim, batch_dim, batch, length, indexed: bool) -> None:
    """Check a table's batch against q's and, unless it is indexed, its rows against q's length."""
    if table.shape[batch_dim] not in (1, batch):
        raise check.shape(name, table, f"a batch of 1 or {batch}")
    if not indexed and table.shape[rows_dim] != length:
        raise check.shape(name, table, f"{length} rows, one for each token of q")


def check_positions(
    name: str, positions, shapes: tuple[tuple[int, ...], ...], rows: int, q, of: str = "q"
):
    """Check row numbers: integers on q's device, of one of `shapes`, within a table of `rows` rows.

    Values are checked on the CPU only. On a device the check would wait; there, a row outside the
    table gives NaN.
    """
    check.indices(name, positions)
    check.same_device(name, positions, of, q)
    if tuple(positions.shape) not in shapes:
        raise check.shape(name, positions, " or ".join(str(list(s)) for s in shapes))
    if library.readable(positions):
        indices.check_within(name, positions, 0, rows - 1)


def check_cu_seqlens(cu_seqlens, q) -> None:
    """Check packed lengths without reading their values."""
    check.indices("cu_seqlens", cu_seqlens)
    check.same_device("cu_seqlens", cu_seqlens, "q", q)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise check.shape("cu_seqlens", cu_seqlens, "[sequences + 1]")
