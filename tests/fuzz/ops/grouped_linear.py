"""Fuzzer target of grouped_linear: products of row groups, each with its own matrix."""

from __future__ import annotations

from itertools import accumulate

import torch

from fuzz.formula import Out
from fuzz.target import DTYPES, Target, tensor

# Expected results


def grouped_linear(x, weight, offs):
    row = torch.arange(x.shape[0])
    out = x.new_zeros(x.shape[0], weight.shape[1])
    begin = 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        mine = ((row >= begin) & (row < end))[:, None]
        out = torch.where(mine, (x[:, None, :] * matrix).sum(-1), out)
        begin = end
    return [Out(out)]


# Calls to draw


def make_grouped_linear(s, draw):
    dtype, sizes = s["dtype"], s["sizes"]
    return {
        "x": draw.normal(sum(sizes) + s["behind"], s["depth"], dtype=dtype),
        "weight": draw.normal(len(sizes), s["columns"], s["depth"], dtype=dtype),
        "offs": tensor(list(accumulate(sizes)), s["offs_dtype"]),
    }


TARGETS = {
    "grouped_linear": Target(
        grouped_linear,
        dict(sizes=((2, 3), (0, 0, 1), (1,), (130, 0, 2), (0,), ()), behind=(0, 2),
             depth=(4, 1, 3, 40, 129, 0), columns=(3, 1, 8, 17, 0), dtype=DTYPES,
             offs_dtype=("int32", "int64")),
        make_grouped_linear, ("x", "weight"),
        loose=True,
    ),
}  # fmt: skip
