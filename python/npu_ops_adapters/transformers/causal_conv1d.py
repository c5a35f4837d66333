"""Replaces the short convolution before linear attention; packed sequences do not mix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.causal_conv1d import arguments
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant

_PACKAGE = (
    *("x", "weight", "bias", "seq_idx", "initial_states", "return_final_states"),
    *("final_states_out", "activation"),
)


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_fn`.

    In version 4 that is the function of the package causal-conv1d, or None without the package.
    """
    yield from models.compared(
        models.linear(),
        models.CONVOLUTION,
        "causal_conv1d",
        (Variant(ours, _calls),),
        ("hidden_states", "weight", "bias", "activation", "kwargs"),
        trusted=(_PACKAGE, None),
        instead_of_none=_plain,
    )


def _calls(function) -> list[tuple]:
    draw = Draw()
    x, weight = draw.normal(2, 6, 9), draw.normal(6, 4)
    return [(x, weight, draw.normal(6)), (x.bfloat16(), weight.bfloat16(), None, "silu")]


def ours(
    hidden_states=None, weight=None, bias=None, activation=None, *, x=None, seq_idx=None,
    cu_seq_lens_q=None, initial_states=None, return_final_states=False, final_states_out=None,
    **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers; hidden_states is `[B, D, T]`.

    cu_seq_lens_q or seq_idx gives the packed sequences. With seq_idx alone the host waits for the
    device, because the number of sequences depends on its values.
    """
    x = hidden_states if x is None else x
    for name, value in (("initial_states", initial_states), ("out", final_states_out)):
        if value is not None or return_final_states:
            raise ValueError(f"{name}: got states, needs none")
    check.floating("hidden_states", x)
    check_device(x)
    if x.dim() != 3:
        raise check.shape("hidden_states", x, "[B, D, T]")
    rows = x.transpose(1, 2)
    if seq_idx is not None and cu_seq_lens_q is None:
        cu_seq_lens_q = _starts(seq_idx, rows)
    arguments.check_rows(rows, weight, bias, activation, cu_seq_lens_q)
    return functools.partial(_by_channel, rows, weight, bias, activation, cu_seq_lens_q)


def _starts(seq_idx, rows):
    """Return cu_seqlens from seq_idx `[1, T]`, the sequence number of each token."""
    check.tensor("seq_idx", seq_idx)
    if seq_idx.shape != (1, rows.shape[1]):
        raise check.shape("seq_idx", seq_idx, f"[1, {rows.shape[1]}]")
    check.same_device("seq_idx", seq_idx, "hidden_states", rows)
    changes = (seq_idx[0].diff() != 0).nonzero().flatten() + 1
    ends = [changes.new_full((1,), n) for n in (0, rows.shape[1])]
    return torch.cat((ends[0], changes, ends[1]))


def _by_channel(rows, weight, bias, activation, cu_seqlens):
    y, _ = npu_ops.causal_conv1d(rows, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    return y.transpose(1, 2)


def _plain(x, weight, bias=None, activation=None, seq_idx=None):
    """Convolve x `[B, D, T]` in PyTorch, as version 4 does without the package causal-conv1d."""
    if seq_idx is not None:
        raise ValueError("seq_idx: got a value with a batch, needs the package causal-conv1d")
    weight, length = weight[:, None], x.shape[2]
    padding = weight.shape[2] - 1
    y = torch.nn.functional.conv1d(x, weight, bias, padding=padding, groups=weight.shape[0])
    y = y[..., :length]
    return y if activation is None else torch.nn.functional.silu(y)
