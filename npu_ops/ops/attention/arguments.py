"""What the implementations of attention see: tensors in one form, and the rule in numbers.

Every layout of the caller becomes a view in the order batch, heads, tokens, head dimension, with
contiguous last dimension. Packed tokens are a batch of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from npu_ops.core import check, library, shadow

LAYOUTS = ("BSND", "BNSD", "SBND", "TND", "BSH", "SBH")
UNLIMITED = -1

# Where a layout has batch, heads, tokens and head dimension; packed tokens get a batch first.
_ORDER = {"BSND": "BSND", "BNSD": "BNSD", "SBND": "SBND", "TND": "BSND"}
_TO_NORMAL = {name: [order.index(axis) for axis in "BNSD"] for name, order in _ORDER.items()}
_FROM_NORMAL = {name: ["BNSD".index(axis) for axis in order] for name, order in _ORDER.items()}


@shadow.keep
class Extra(NamedTuple):
    """The tensors of a call that may be None.

    bias: `[B or 1, N or 1, Sq or 1, Sk]`, q's dtype or fp32. mask: bool of such a shape, True takes
        part. Views of any strides; without packed or paged keys alone.
    sinks: fp32 `[N]` (fp64 where q is).
    cu_seqlens_q, cu_seqlens_k: int32 or int64 `[n + 1]`, 0 first and the number of tokens last.
    seqlens_k: int32 or int64 `[n]`: the keys of a sequence that exist.
    block_table: int32 `[n, blocks]`: key j of a sequence is row `j % block_size` of block
        `j // block_size` of its row here. Entries past the length mean nothing.
    rng_state: int64 `[2]`, seed and offset of dropout.
    ..._cpu: copies in host memory for operators that take lists.
    """

    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None
    cu_seqlens_q_cpu: torch.Tensor | None = None
    cu_seqlens_k_cpu: torch.Tensor | None = None
    seqlens_k_cpu: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Shapes alone: values may be on a device."""
        given = ((name, x) for name, x in zip(self._fields, self, strict=True) if x is not None)
        return "Extra(" + ", ".join(f"{name}={list(x.shape)}" for name, x in given) + ")"


@shadow.keep
class Rule(NamedTuple):
    """The numbers of a call.

    layout: the order of the output in memory: BSND, BNSD, SBND or TND.
    max_seqlen_q, max_seqlen_k: no sequence is longer.
    window_left, window_right: keys before and after the diagonal that take part; UNLIMITED: all.
        A causal mask is a window_right of 0.
    bottom_right: the diagonal ends at the last query and the last key, else it starts at the first.
    softcap: 0 for none.
    training: a gradient will be wanted.
    """

    layout: str
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    bottom_right: bool
    softcap: float
    dropout_p: float
    deterministic: bool
    training: bool


def normal(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of a layout (not BSH, SBH) as batch, heads, tokens, head dimension."""
    x = x.unsqueeze(0) if layout == "TND" else x
    return x.permute(_TO_NORMAL[layout])


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `normal`."""
    x = x.permute(_FROM_NORMAL[layout])
    return x.squeeze(0) if layout == "TND" else x


def shape_in_layout(shape, layout: str) -> list[int]:
    """The shape of batch, heads, tokens, head dimension in a layout."""
    return [shape[axis] for axis in _FROM_NORMAL[layout]][layout == "TND" :]


def split_heads(name: str, x, layout: str, heads: int | None) -> tuple[torch.Tensor, str]:
    """BSH and SBH as BSND and SBND; other layouts as they are."""
    check.floating(name, x)
    if layout in ("BSH", "SBH"):
        if not isinstance(heads, int) or x.dim() != 3 or heads < 1 or x.shape[2] % heads:
            raise check.shape(name, x, f"[.., .., heads * head_dim] for {heads} heads ({layout})")
        x, layout = x.unflatten(2, (heads, -1)), layout[:2] + "ND"
    if x.dim() != len(layout):
        raise check.shape(name, x, f"{len(layout)} dimensions for layout {layout}")
    return x, layout


def check_heads(q, k, v, paged: bool) -> None:
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


def dense(name: str, x, q, k) -> torch.Tensor | None:
    """A mask or bias as a view of 4 dimensions. One of 1 or 3 could be read in two ways."""
    if x is None:
        return None
    check.tensor(name, x)
    check.same_device(name, x, "q", q)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if x.dim() == 2:
        fits = tuple(x.shape) == full[2:]
    else:
        fits = x.dim() == 4 and all(n in (1, m) for n, m in zip(x.shape, full, strict=True))
    if not fits:
        raise check.shape(
            name, x, f"{list(full[2:])}, or {list(full)} where any may be 1 (not 1 or 3 dimensions)"
        )
    x = x if x.dim() == 4 else x[None, None]
    return x.expand(-1, -1, -1, k.shape[2])


def check_lengths(name: str, x, q, entries: int | None, total: int | None = None) -> None:
    """Check lengths, or with `total` the starts of sequences and their end.

    Values only where reading them waits for no device and breaks no trace.
    """
    check.indices(name, x)
    if q is not None:
        check.same_device(name, x, "q", q)
    if x.dim() != 1 or (x.numel() < 2 if entries is None else x.numel() != entries):
        raise check.shape(name, x, "[sequences + 1]" if entries is None else f"[{entries}]")
    if x.device.type == "cpu" and library.is_plain(x):
        _check_values(name, x, total)


def _check_values(name, x, total) -> None:
    if total is None:
        if x.numel() and x.min() < 0:
            raise ValueError(f"{name}: got {int(x.min())}, needs lengths that are not negative")
        return
    first, last = int(x[0]), int(x[-1])
    if first != 0 or last != total:
        raise ValueError(
            f"{name}: got {first} first and {last} last, needs 0 and {total}, the number of tokens"
        )
    if (x.diff() < 0).any():
        raise ValueError(f"{name}: got a negative length, needs starts that do not decrease")


def longest(name: str, given, lengths, bound: int) -> int:
    """max_seqlen: what is given, else `bound`; checked where `lengths` can be read."""
    if given is None:
        return bound
    if not isinstance(given, int) or given < 0:
        raise ValueError(f"{name}: got {given!r}, needs a number of tokens")
    if lengths.device.type == "cpu" and library.is_plain(lengths) and lengths.numel():
        if int(lengths.max()) > given:
            raise ValueError(f"{name}: got {given}, needs {int(lengths.max())} or more")
    return given


def window_of(is_causal, window) -> tuple[int, int]:
    """(left, right) of a window and of a causal mask, which is a right side of 0."""
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        pair = isinstance(window, (tuple, list)) and len(window) == 2
        if not pair or not all(isinstance(n, int) and n >= UNLIMITED for n in window):
            raise ValueError(
                f"window: got {window!r}, needs (left, right), keys before and after the "
                "diagonal, -1 for all"
            )
        left, right = window
    return left, 0 if is_causal else right


def number(name: str, value, low: float, high: float, needs: str) -> float:
    """`value` as a float, in [low, high)."""
    if not isinstance(value, (int, float)) or not low <= value < high:
        raise ValueError(f"{name}: got {value!r}, needs {needs}")
    return float(value)


def scale_of(scale, head_dim: int) -> float:
    """The scale of the scores."""
    if scale is None:
        return head_dim**-0.5
    return number("scale", scale, -math.inf, math.inf, "a finite number")


def on_host(name: str, x) -> torch.Tensor | None:
    """Lengths in host memory, given as a tensor or a list of ints."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        if not all(isinstance(n, int) for n in x):
            raise TypeError(f"{name}: got {x!r}, needs ints")
        x = torch.tensor(x, dtype=torch.int64, device="cpu")
    if x.device.type != "cpu":
        raise ValueError(f"{name}: got device {x.device}, needs cpu")
    return x


def pair_on_host(x) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """cu_seqlens_cpu: for queries and keys, or one for both."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and not isinstance(x[0], int):
        return on_host("cu_seqlens_cpu", x[0]), on_host("cu_seqlens_cpu", x[1])
    x = on_host("cu_seqlens_cpu", x)
    return x, x
