"""Fuzzer targets of norms, gates, swiglu and bias-dropout-add."""

from __future__ import annotations

import torch

from fuzz.formula import Out, drawn, sigmoid, softplus, unit
from fuzz.target import DTYPES, NO, SHAPE, YES, Target

# Expected results


def l2norm(x, eps=1e-6, output_dtype=None, dim=-1):
    return [Out(unit(x, eps))]


def rms_norm_gated(
    x, weight, z, eps=1e-6, norm_before_gate=True, activation="silu", group_size=None
):
    gate = sigmoid(z) * (z if activation == "silu" else 1)
    y = x if norm_before_gate else x * gate
    if y.numel():
        groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
        square = (groups * groups).mean(-1, keepdim=True)
        y = (groups / torch.sqrt(square + eps)).flatten(-2) * weight
    return [Out(y * gate if norm_before_gate else y)]


def rms_norm(x, weight, eps=1e-6, zero_centered=False):
    root = torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return [Out(x / root * (weight + (1 if zero_centered else 0)))]


def add_rms_norm(x, residual, weight, eps=1e-6, zero_centered=False):
    return [*rms_norm(x + residual, weight, eps, zero_centered), Out(x + residual)]


def gdn_gate(
    a, A_log, dt_bias=None, b=None, allow_neg_eigval=False, softplus_beta=1.0,
    softplus_threshold=20.0,
):  # fmt: skip
    raw = a if dt_bias is None else a + dt_bias
    g = Out(-torch.exp(A_log) * softplus(raw, softplus_beta, softplus_threshold))
    return [g] if b is None else [g, Out(sigmoid(b) * (2 if allow_neg_eigval else 1))]


def swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return [Out(gate * sigmoid(gate) * up)]


def bias_dropout_add(
    x, bias, residual, p, training, dtype=None, inplace=False, generator=None, keep=None
):
    total = x if bias is None else x + bias
    if keep is not None:
        total = total * keep / (1 - drawn(p))
    return [Out(residual + total, "x" if inplace else None)]


# Calls to draw


def make_l2norm(s, draw):
    dtype = s["output_dtype"]
    return {
        "x": draw.normal(*s["shape"], s["dim"], dtype=s["dtype"]), "eps": s["eps"],
        "output_dtype": dtype and getattr(torch, dtype),
    }  # fmt: skip


def make_rms_norm_gated(s, draw):
    shape, groups = s["shape"], s["groups"]
    dim = s["dim"] * (groups or 1)
    return {
        "x": draw.normal(*shape, dim, dtype=s["dtype"]),
        "weight": draw.normal(dim, dtype=s["weight"]),
        "z": draw.normal(*shape, dim, dtype=s["z"]), "norm_before_gate": s["before"],
        "activation": s["activation"], "group_size": s["dim"] if groups else None, "eps": s["eps"],
    }  # fmt: skip


def make_rms_norm(s, draw):
    shape = *s["shape"], s["dim"]
    given = {
        "x": draw.normal(*shape, dtype=s["dtype"]),
        "weight": draw.normal(s["dim"], dtype=s["weight"]), "eps": s["eps"],
        "zero_centered": s["zero_centered"],
    }  # fmt: skip
    return given | ({"residual": draw.normal(*shape, dtype=s["dtype"])} if s["add"] else {})


def make_gdn_gate(s, draw):
    heads, dtype, parameter = s["heads"], s["dtype"], s["parameter"]
    arguments = {
        "a": draw.normal(*s["shape"], heads, dtype=dtype) * s["size"] - 1.3 * s["rate"],
        "A_log": draw.normal(heads, dtype=parameter) + s["rate"],
        "dt_bias": draw.normal(heads, dtype=parameter) if s["bias"] else None,
        "b": None, "softplus_beta": s["bend"], "softplus_threshold": s["threshold"],
    }  # fmt: skip
    if s["b"]:
        arguments |= {
            "b": draw.normal(*s["shape"], heads, dtype=s["b"]), "allow_neg_eigval": s["neg"],
        }  # fmt: skip
    return arguments


def make_swiglu(s, draw):
    """Return the arguments of swiglu. With a large `size` the gates saturate."""
    shape, dtype, size = s["shape"], s["dtype"], s["size"]
    if s["in_one"]:
        return {"gate": draw.normal(*shape, 2 * s["dim"], dtype=dtype) * size}
    return {
        "gate": draw.normal(*shape, s["dim"], dtype=dtype) * size,
        "up": draw.normal(*shape, s["dim"], dtype=dtype),
    }


def make_bias_dropout_add(s, draw):
    shape, dtype = [*s["shape"], s["dim"]], s["dtype"]
    result = s["result"] and getattr(torch, s["result"])
    residual = draw.normal(*shape, dtype=dtype if s["inplace"] else s["residual"])
    x = draw.normal(*shape, dtype=dtype)
    if s["p"]:  # dropped elements must be recognisable
        x = x.abs() + 1
    bias_shape = {"no": None, "row": shape[-1:], "full": shape}[s["bias"]]
    bias = None if bias_shape is None else draw.uniform(0, 1, *bias_shape, dtype=dtype)
    if s["together"] and s["inplace"] and shape[0] > 1 and x.dim() > 1:
        # x and the residual share memory, shifted by one row
        memory = draw.normal(shape[0] + 1, *shape[1:], dtype=dtype)
        x, residual = memory[1:], memory[:-1]
    return {
        "x": x, "bias": bias, "residual": residual, "p": s["p"], "training": s["training"],
        "dtype": None if s["inplace"] else result, "inplace": s["inplace"],
    }  # fmt: skip


def dropped_elements(arguments, outputs):
    """Return which elements dropout kept: those whose output differs from the residual."""
    if not (arguments["training"] and arguments["p"]):
        return None
    residual = arguments["residual"]
    bias = 0 if arguments["bias"] is None else arguments["bias"]
    return (outputs[0].double() - residual).abs() > 0.25 * (arguments["x"] + bias).abs()


def of_rms_norm(formula, add: bool):
    """Return the target of rms_norm, or of add_rms_norm."""
    settings = dict(
        shape=SHAPE, dim=(4, 1, 3, 8, 16, 40, 128), dtype=DTYPES, weight=DTYPES, eps=(1e-6, 1e-3),
        zero_centered=NO, add=(add,),
    )  # fmt: skip
    wrt = ("x", "residual", "weight") if add else ("x", "weight")
    # loose: add_rms_norm rounds the sum to the inputs' dtype and normalises the rounded sum.
    return Target(formula, settings, make_rms_norm, wrt, loose=add)


TARGETS = {
    "l2norm": Target(
        l2norm,
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 16, 40, 128, 0), dtype=DTYPES, eps=(1e-6, 1e-3),
            output_dtype=(None, *DTYPES),
        ),
        make_l2norm, ("x",),
    ),
    "rms_norm_gated": Target(
        rms_norm_gated,
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 16, 40, 128), groups=(None, 1, 2, 3), dtype=DTYPES,
            weight=DTYPES, z=DTYPES, before=YES, activation=("silu", "sigmoid"), eps=(1e-6, 1e-3),
        ),
        make_rms_norm_gated, ("x", "weight", "z"),
    ),
    "rms_norm": of_rms_norm(rms_norm, add=False),
    "add_rms_norm": of_rms_norm(add_rms_norm, add=True),
    "gdn_gate": Target(
        gdn_gate,
        dict(
            shape=SHAPE, heads=(4, 1, 3, 32, 0), dtype=DTYPES, parameter=DTYPES, bias=NO,
            b=(None, *DTYPES), neg=NO, size=(1, 30), rate=(0, 60, 90), bend=(1.0, 0.5, 3.0),
            threshold=(20.0, 0.0, 2.0, 1e9),
        ),
        make_gdn_gate, ("a", "A_log", "dt_bias", "b"),
    ),
    "swiglu": Target(
        swiglu,
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 40, 129, 192, 0), dtype=DTYPES, in_one=NO, size=(1, 30),
        ),
        make_swiglu, ("gate", "up"),
    ),
    "bias_dropout_add": Target(
        bias_dropout_add,
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 40, 129, 0), dtype=DTYPES, residual=DTYPES,
            result=(None, *DTYPES), bias=("no", "row", "full"), p=(0.0, 0.1, 0.5, 0.999, 1e-6),
            training=YES, inplace=NO, together=NO,
        ),
        make_bias_dropout_add, ("x", "bias", "residual"),
        writes=lambda s: ("x",) if s["inplace"] else (),
        forms=lambda name, s: ("dense", "inside") if name == "x" and s["inplace"] else None,
        drops=dropped_elements,
    ),
}  # fmt: skip
