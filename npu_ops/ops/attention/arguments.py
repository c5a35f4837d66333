"""Converts the public arguments of attention to one form: tensors, and the numbers of a `Rule`.

Tensors of every layout become views in normal form: batch, heads, tokens, head dimension. Packed
tokens are a batch of one. The operator (op.py) makes the last dimension contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npu_ops.core import check, shadow

LAYOUTS = ("BSND", "BNSD", "SBND", "TND", "BSH", "SBH")
UNLIMITED = -1

# Order of batch, heads, tokens and head dimension in each layout, after TND gets a batch first.
_ORDER = {"BSND": "BSND", "BNSD": "BNSD", "SBND": "SBND", "TND": "BSND"}
_TO_NORMAL = {name: [order.index(axis) for axis in "BNSD"] for name, order in _ORDER.items()}
_FROM_NORMAL = {name: ["BNSD".index(axis) for axis in order] for name, order in _ORDER.items()}


@shadow.keep
class Extra(NamedTuple):
    """The optional tensors of a call.

    bias: `[B or 1, N or 1, Sq or 1, Sk]`, q's dtype or fp32.
    mask: bool of the same shapes, True where a query attends to a key. Bias and mask may have any
    strides; neither is allowed with packed or paged keys.
    sinks: fp32 `[N]` (fp64 if q is).
    cu_seqlens_q, cu_seqlens_k: int32 or int64 `[n + 1]`; the first is 0, the last at most the
    number of tokens.
    seqlens_k: int32 or int64 `[n]`: number of keys of each sequence.
    block_table: int32 `[n, blocks]`: key j of sequence i is row `j % block_size` of block
    `block_table[i, j // block_size]`. Entries past the length are ignored.
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
        """Show shapes only: reading values could wait for a device."""
        given = ((name, x) for name, x in zip(self._fields, self, strict=True) if x is not None)
        return "Extra(" + ", ".join(f"{name}={list(x.shape)}" for name, x in given) + ")"


@shadow.keep
class Rule(NamedTuple):
    """The settings of a call.

    layout: the order of the output in memory: BSND, BNSD, SBND or TND.
    max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths.
    window_left, window_right: number of keys before and after the diagonal to attend to; UNLIMITED:
    all. A causal mask is a window_right of 0.
    bottom_right: the diagonal ends at the last query and the last key; otherwise it starts at the
    first of both.
    softcap: 0 for none.
    training: whether a gradient will be needed.
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


def last_seen(q: torch.Tensor, k: torch.Tensor, rule: Rule) -> int:
    """Return n, so that query i attends to the keys j <= i + n.

    Valid for dense sequences without a left window.
    """
    if rule.window_right < 0:
        return k.shape[2]
    return rule.window_right + (k.shape[2] - q.shape[2] if rule.bottom_right else 0)


# Layouts that are BNSD with S and N swapped. For them, `normal` and `in_layout` use one transpose,
# which takes less host time than a permute of all axes.
_SWAPPED = ("BSND", "TND")


def normal(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View a tensor of `layout` (not BSH, SBH) as batch, heads, tokens, head dimension."""
    if layout == "BNSD":
        return x
    x = x.unsqueeze(0) if layout == "TND" else x
    if layout in _SWAPPED:
        return x.transpose(1, 2)
    return x.permute(_TO_NORMAL[layout])


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View a tensor in the order batch, heads, tokens, head dimension as `layout`."""
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2) if layout in _SWAPPED else x.permute(_FROM_NORMAL[layout])
    return x.squeeze(0) if layout == "TND" else x


def shape_in_layout(shape, layout: str) -> list[int]:
    """Return the shape in `layout` of a tensor with shape batch, heads, tokens, head dimension."""
    return [shape[axis] for axis in _FROM_NORMAL[layout]][layout == "TND" :]


def split_heads(name: str, x, layout: str, heads: int | None) -> tuple[torch.Tensor, str]:
    """View BSH and SBH as BSND and SBND; return other layouts unchanged."""
    check.floating(name, x)
    if layout in ("BSH", "SBH"):
        if not isinstance(heads, int) or x.dim() != 3 or heads < 1 or x.shape[2] % heads:
            raise check.shape(name, x, f"[.., .., heads * head_dim] for {heads} heads ({layout})")
        x, layout = x.view(*x.shape[:2], heads, x.shape[2] // heads), layout[:2] + "ND"
    if x.dim() != len(layout):
        raise check.shape(name, x, f"{len(layout)} dimensions for layout {layout}")
    return x, layout


def in_one_form(call):
    """Return a call with q, k and v in the order BNSD, and with one form for each other argument.

    `layout` becomes that of the output. `cu_seqlens_cpu` becomes a pair, `seqlens_k_cpu` a tensor.
    Packed keys without `cu_seqlens_k` get the queries' `cu_seqlens_q`.
    """
    names = (
        "attn_mask", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table", "sinks",
    )  # fmt: skip
    check.optional_tensors(**{name: getattr(call, name) for name in names})
    check.one_of("layout", call.layout, LAYOUTS)
    q, k, v, layout = _in_normal_form(call)
    paged = call.block_table is not None
    same_starts = call.cu_seqlens_k is None and layout == "TND" and not paged
    return call._replace(
        q=q,
        k=k,
        v=v,
        layout=layout,
        cu_seqlens_k=call.cu_seqlens_q if same_starts else call.cu_seqlens_k,
        cu_seqlens_cpu=_pair_on_host(call.cu_seqlens_cpu),
        seqlens_k_cpu=_on_host("seqlens_k_cpu", call.seqlens_k_cpu),
    )


def _in_normal_form(call):
    """Return q, k and v as views in the order BNSD, and the output's layout.

    Under autocast, q, k and v are cast to its dtype, unless q is fp64.
    """
    heads, key_heads = call.num_heads, call.num_key_value_heads
    key_heads = heads if key_heads is None else key_heads
    q, layout = split_heads("q", call.q, call.layout, heads)
    key_layout = call.layout
    if call.block_table is not None:
        check.floating("k", call.k)
        key_layout = "BSH" if call.k.dim() == 3 else "BNSD" if layout == "BNSD" else "BSND"
    k, _ = split_heads("k", call.k, key_layout, key_heads)
    v, key_layout = split_heads("v", call.v, key_layout, key_heads)
    device = q.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)  # as torch's SDPA does under autocast
        q, k, v = (x.to(dtype) for x in (q, k, v))
    return normal(q, layout), normal(k, key_layout), normal(v, key_layout), layout


def keys_of(call) -> int:
    """Return the maximum number of keys of a sequence; for packed sequences, the total number."""
    keys = call.k.shape[2]
    return keys if call.block_table is None else keys * call.block_table.shape[1]


def for_all_keys(x: torch.Tensor, k) -> torch.Tensor:
    """View a mask or bias with 4 dimensions, expanded to all keys."""
    x = x if x.dim() == 4 else x[None, None]
    return x.expand(-1, -1, -1, k.shape[2])


def _on_host(name: str, x) -> torch.Tensor | None:
    """Return lengths in host memory as a tensor; `x` is a tensor or a list of ints."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        if not all(isinstance(n, int) for n in x):
            raise TypeError(f"{name}: got {x!r}, needs ints")
        x = torch.tensor(x, dtype=torch.int64, device="cpu")
    if x.device.type != "cpu":
        raise ValueError(f"{name}: got device {x.device}, needs cpu")
    return x


def _pair_on_host(x) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split cu_seqlens_cpu into the queries' and the keys' lengths; one value serves both."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and not isinstance(x[0], int):
        return _on_host("cu_seqlens_cpu", x[0]), _on_host("cu_seqlens_cpu", x[1])
    x = _on_host("cu_seqlens_cpu", x)
    return x, x
