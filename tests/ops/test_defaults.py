"""Ops give the same bits under other torch default dtypes and devices, as model loaders set."""

import contextlib

import pytest
import torch
from npu_ops_tools.where import ops
from support import evaluate, forced

import npu_ops
from npu_ops.core import cases
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
    """Yield (name, function, function that makes its arguments, names of differentiable ones)."""
    for case in cases.of(op).CASES:
        if case.large or case.tokens > SMALL:
            continue
        yield case.name, cases.function(op, case), case.inputs, cases.differentiable(op, case)
        if op == "mrope" and case.layout == "TND":
            yield (
                f"{case.name}-cached",
                npu_ops.apply_multimodal_rotary_pos_emb_cached,
                case.cached_inputs,
                ("q", "k"),
            )
    yield from more_calls(op)


def more_calls(op):
    """Yield calls that no case covers."""
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
    """Return outputs, gradients, and the tensors written in place, by name."""
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
    """Cases draw the same inputs under any defaults."""
    for case in cases.of(op).CASES:
        if not case.large:
            expected = case.inputs(torch.float32)
            with DEFAULTS[default]():
                assert same(case.inputs(torch.float32), expected), case.name


def folded():
    """Yield calls that split heads out of a flat dimension."""
    q, k, v = (torch.randn(2, 5, n * 8) for n in (4, 2, 2))
    heads = {"num_heads": 4, "num_key_value_heads": 2}
    yield npu_ops.attention, {"q": q, "k": k, "v": v, "layout": "BSH"} | heads
    yield (
        npu_ops.apply_multimodal_rotary_pos_emb_cached,
        {
            "positions": torch.arange(5), "q": q[0], "k": k[0], "cos_sin_cache": torch.randn(9, 8),
            "mrope_section": [2, 1, 1], "section_layout": "chunked", "head_dim": 8,
        },
    )  # fmt: skip
    gates = [torch.randn(*shape) for shape in ((3, 4), (3, 4), (4,), (4,))]
    given = dict(zip(("a", "b", "A_log", "dt_bias"), gates, strict=True))
    slots = {"state": torch.randn(3, 4, 8, 8), "state_indices": torch.arange(3)}
    yield (
        npu_ops.gated_delta_rule_update,
        {"qkv": torch.randn(3, 2 * 2 * 8 + 4 * 8), "state_v_first": True} | given | slots,
    )


@pytest.mark.parametrize("number", range(3))
def test_compiled_under_another_default_device(number):
    """Dynamo cannot trace `unflatten` while a default device is set, so npu-ops
    must not call it."""
    function, inputs = list(folded())[number]
    expected = results(function, inputs, ())
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with DEFAULTS["bfloat16, meta"]():
        actual = results(compiled, inputs, ())
    assert same(actual, expected)
