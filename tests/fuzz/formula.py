"""What the formulas of all operators share.

A formula is an operator's mathematics in fp64, written from the papers and docstrings without
npu_ops: token by token, sequence by sequence. It takes the arguments of the public function,
floating tensors in fp64, and returns a list of `Out`. Autograd of it is the gradient that is
expected. Index values that the docstrings exclude raise `Refused`.
"""

from __future__ import annotations

import dataclasses

import torch

WIDE = torch.float64


class Refused(Exception):
    """The arguments have no meaning; says which of them."""


@dataclasses.dataclass
class Out:
    """A result. argument: of which argument these are the contents afterwards, if of one.

    known: bool, broadcast to the value, which elements are specified; None: all.
    """

    value: torch.Tensor | None
    argument: str | None = None
    known: torch.Tensor | None = None


def need(condition: bool, argument: str) -> None:
    if not condition:
        raise Refused(argument)


def need_ranks(cp_group, cp_layout, cu_seqlens, **alone) -> None:
    """Raise `Refused` if arguments of context parallelism have no meaning. The group has one rank,
    which has all tokens.

    alone: arguments that cannot be given together with a group.
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
    """Where each packed sequence begins and ends. Tokens behind the last one are nobody's."""
    starts = starts.tolist()
    need(starts[0] == 0, name)
    need(starts[-1] <= tokens, name)
    pairs = list(zip(starts, starts[1:], strict=False))
    need(all(begin <= end for begin, end in pairs), name)
    return pairs


def softplus(x, beta=1.0, threshold=20.0):
    """torch's, which models are trained with: from the threshold on its argument itself."""
    bent = beta * x
    plus = bent.clamp_min(0) + torch.log1p(torch.exp(-bent.abs()))
    return torch.where(bent > threshold, x, plus / beta)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def unit(x, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def drawn(p: float) -> float:
    """The probability of dropping that 16 bits can have: never all or nothing."""
    return min(max(round(p * 65536), 1), 65535) / 65536
