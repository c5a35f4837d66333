"""Every op under torch's other defaults, which model loaders set: the same bits."""

import contextlib
import importlib

import pytest
import torch
from npu_ops_tools.where import ops
from support import evaluate, forced

import npu_ops
from npu_ops.core.registry import Table

SMALL = 300  # tokens


@contextlib.contextmanager
def set_defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@contextlib.contextmanager
def within(dtype, device):
    with set_defaults(dtype, None), torch.device(device):
        yield


DEFAULTS = {
    "bfloat16, meta": lambda: set_defaults(torch.bfloat16, "meta"),
    "float64, with meta": lambda: within(torch.float64, "meta"),
}


def calls(op):
    """(a name, a function, what makes its arguments, what it is differentiable in)"""
    module = importlib.import_module(f"npu_ops.ops.{op}.cases")
    for case in module.CASES:
        if case.large or case.tokens > SMALL:
            continue
        function = getattr(npu_ops, getattr(case, "function", ops()[op][0]))
        wrt = getattr(case, "differentiable", module.DIFFERENTIABLE)
        yield case.name, function, case.inputs, wrt
        if op == "mrope" and case.layout == "TND":
            yield (
                f"{case.name}-cached",
                npu_ops.apply_multimodal_rotary_pos_emb_cached,
                case.cached_inputs,
                ("q", "k"),
            )
    yield from more_calls(op)


def more_calls(op):
    """What no case has."""
    if op == "rope":
        for size in (1, 2):
            yield f"freqs-{size}", npu_ops.apply_rotary_pos_emb_freqs, freqs(size), ("q", "k")
        yield "packed", npu_ops.apply_rotary_pos_emb, packed_rope, ("q", "k")


def freqs(cp_size):
    def inputs(dtype):
        q, k, angles = (torch.randn(8 // cp_size, n, 8) for n in (4, 3, 1))
        packing = {"cu_seqlens": torch.tensor([0, 4, 8]), "cp_size": cp_size, "layout": "TND"}
        whole = angles[:, None].repeat(cp_size, 1, 1, 1)
        return {"q": q.to(dtype), "k": k.to(dtype), "freqs": whole, "mscale": 1.5} | packing

    return inputs


def packed_rope(dtype):
    q, k, cos, sin = (torch.randn(10, *shape) for shape in ((4, 8), (3, 8), (8,), (8,)))
    starts = torch.tensor([0, 3, 10])
    return {"q": q.to(dtype), "k": k.to(dtype), "cos": cos, "sin": sin, "cu_seqlens": starts}


def results(function, inputs, wrt):
    """Outputs, gradients, and what was written in place."""
    torch.manual_seed(0)
    inputs = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    wrt = tuple(name for name in wrt if name in inputs)
    with torch.set_grad_enabled(bool(wrt)):
        found = evaluate(function, inputs, wrt)
    written = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor) and n not in wrt}
    return found | written


def same(actual: dict, expected: dict) -> bool:
    return actual.keys() == expected.keys() and all(
        not isinstance(value, torch.Tensor)
        or (actual[n].dtype == value.dtype and torch.equal(actual[n], value))
        for n, value in expected.items()
    )


@pytest.mark.parametrize("implementation", ["chosen", "reference"])
@pytest.mark.parametrize("op", ops())
def test_torchs_defaults_change_nothing(op, implementation):
    tables = tuple(Table.tables) if implementation == "reference" else ()
    wrong = []
    with forced(implementation, *tables):
        for name, function, make_inputs, wrt in calls(op):
            inputs = make_inputs(torch.float32)
            expected = results(function, inputs, wrt)
            for default, change in DEFAULTS.items():
                with change():
                    actual = results(function, inputs, wrt)
                if not same(actual, expected):
                    wrong.append(f"{name}: {default}")
    assert wrong == []


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("op", ops())
def test_torchs_defaults_do_not_change_cases(op, default):
    """Whoever runs them under other defaults runs the same ones."""
    for case in importlib.import_module(f"npu_ops.ops.{op}.cases").CASES:
        if not case.large:
            expected = case.inputs(torch.float32)
            with DEFAULTS[default]():
                assert same(case.inputs(torch.float32), expected), case.name
