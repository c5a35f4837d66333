"""Fuzzer target of linear: products of rows with one matrix."""

from __future__ import annotations

from fuzz.formula import Out
from fuzz.target import DTYPES, NO, SHAPE, Target

# Expected results


def linear(x, weight, bias=None):
    out = (x[..., None, :] * weight).sum(-1)
    return [Out(out if bias is None else out + bias)]


# Calls to draw


def make_linear(s, draw):
    dtype = s["dtype"]
    return {
        "x": draw.normal(*s["shape"], s["depth"], dtype=dtype),
        "weight": draw.normal(s["columns"], s["depth"], dtype=dtype),
        "bias": draw.normal(s["columns"], dtype=dtype) if s["bias"] else None,
    }


TARGETS = {
    "linear": Target(
        linear,
        dict(shape=SHAPE, depth=(4, 1, 3, 40, 129, 0), columns=(3, 1, 8, 17, 0), dtype=DTYPES,
             bias=NO),
        make_linear, ("x", "weight", "bias"),
        loose=True,
    ),
}  # fmt: skip
