"""Helpers of the formulas of all operators.

A formula is an operator's mathematics in fp64, written from papers and docstrings without npu_ops:
token by token, sequence by sequence. It takes the arguments of the public function, with floating
tensors in fp64, and returns a list of `Out`. Its autograd gradient is the expected gradient. Index
values that the docstrings exclude raise `Refused`.
"""

from __future__ import annotations

import dataclasses

import torch

WIDE = torch.float64


class Refused(Exception):
    """The arguments are invalid; the text names the argument."""


@dataclasses.dataclass
class Out:
    """An expected result.

    argument: name of the argument that the function overwrites with the value; None for a returned
        tensor.
    known: bool, broadcast to the value: which elements are specified; None: all.
    """

    value: torch.Tensor | None
    argument: str | None = None
    known: torch.Tensor | None = None


def need(condition: bool, argument: str) -> None:
    if not condition:
        raise Refused(argument)


def need_ranks(cp_group, cp_layout, cu_seqlens, **alone) -> None:
    """Raise `Refused` if the arguments of context parallelism are invalid.

    The group has one rank, which has all tokens.

    alone: arguments that must not be given together with a group.
    """
    need(cp_layout in ("contiguous", "zigzag"), "cp_layout")
    if cp_group is not None:
        for name, value in alone.items():
            need(value is None or value is False, name)
    if cp_layout == "zigzag":
        need(cp_group is not None, "cp_group")
        need(cu_seqlens is not None, "cu_seqlens")
        need(not (cu_seqlens.diff() % 2).any(), "cu_seqlens")


def spans(starts, tokens: int, name: str) -> list[tuple[int, int]]:
    """Return (begin, end) of each packed sequence. Tokens after the last belong to none."""
    starts = starts.tolist()
    need(starts[0] == 0, name)
    need(starts[-1] <= tokens, name)
    pairs = list(zip(starts, starts[1:], strict=False))
    need(all(begin <= end for begin, end in pairs), name)
    return pairs


def softplus(x, beta=1.0, threshold=20.0):
    """Return torch's softplus, with which models are trained.

    It is x where `beta x` is above the threshold.
    """
    bent = beta * x
    plus = bent.clamp_min(0) + torch.log1p(torch.exp(-bent.abs()))
    return torch.where(bent > threshold, x, plus / beta)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def unit(x, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def drawn(p: float) -> float:
    """Round a dropout probability to 16 bits; the result is never 0 or 1."""
    return min(max(round(p * 65536), 1), 65535) / 65536
