"""The public operators of npu_ops on NPU tensors: their Triton kernels against the reference.

`pytest tests/ops` on the emulated NPU runs every case; here are those that take each branch of the
kernels once, in seconds.
"""

import importlib

import pytest
import torch
from support import assert_all_close, evaluate, floats, forced, named

import npu_ops
from npu_ops.core import env
from npu_ops.core.registry import Table

WRT = {"bias_dropout_add": ("x", "bias", "residual"), "rope": ("q", "k"), "mrope": ("q", "k")}
CASES = {
    "bias_dropout_add": {
        "odd-t63-h129-row": torch.bfloat16, "batch-3-full-bias": torch.float32,
        "p-0": torch.float16, "qwen3-4b-decode-1": torch.bfloat16, "odd-t0-h80-none": torch.float32,
    },
    "rope": {
        "qwen3.5-9b-tp4-t64": torch.bfloat16, "odd-BNSD-t65-interleaved": torch.float32,
        "head-96-interleaved-half-table": torch.float16, "odd-BSND-t0-half": torch.float32,
    },
    "mrope": {
        "qwen3-vl-8b-tp4-t64": torch.bfloat16, "qwen2-vl-7b-tp4-t1": torch.float32,
        "odd-SBND-t63-chunked-sections-half-pairs": torch.float16,
    },
}  # fmt: skip


def chosen_cases():
    """(op, case, dtype) of every name above."""
    for op, dtypes in CASES.items():
        cases = importlib.import_module(f"npu_ops.ops.{op}.cases").CASES
        known = {case.name: case for case in cases}
        for name, dtype in dtypes.items():
            yield pytest.param(op, known[name], dtype, id=f"{op}-{name}-{named(dtype)}")


def run(op, inputs, wrt):
    package = importlib.import_module(f"npu_ops.ops.{op}")
    torch.npu.manual_seed(1)  # both runs draw the same mask
    return evaluate(getattr(package, package.__all__[0]), inputs, wrt)


@pytest.mark.parametrize("op, case, dtype", list(chosen_cases()))
def test_triton_equals_reference(op, case, dtype, monkeypatch):
    used = []
    for name in (op, f"{op}_backward"):
        if name in Table.tables:
            monkeypatch.setattr(Table.tables[name], "run", recording(Table.tables[name], used))
    cases = importlib.import_module(f"npu_ops.ops.{op}.cases")
    inputs = case.inputs(dtype, "npu")
    wrt = tuple(name for name in WRT[op] if inputs[name] is not None)
    with forced("reference", op, f"{op}_backward"):
        expected = run(op, floats(inputs, torch.float64), wrt)
    assert set(used) <= {"reference"}
    used.clear()
    with env.override(strict=True):
        actual = run(op, case.inputs(dtype, "npu"), wrt)
    assert all(value.device.type == "npu" for value in actual.values())
    assert set(used) <= {"triton_ascend"} and (used or not case.tokens)
    sums = getattr(cases, "SUM_TOLERANCES", cases.TOLERANCES)
    assert_all_close(actual, expected, cases.TOLERANCES, {"gradient of bias": sums})


def recording(table, used):
    """`table.run` that notes which implementation it takes."""

    def run(*args):
        implementation = table.select(*args)
        used.append(implementation.name)
        implementation.launcher(*args)

    return run


def test_explain_answers_for_npu_tensors():
    case = importlib.import_module("npu_ops.ops.rope.cases").CASES[0]
    verdicts = npu_ops.explain("apply_rotary_pos_emb", **case.inputs(torch.bfloat16, "npu"))
    assert [(v.implementation, v.why_not) for v in verdicts] == [
        ("triton_ascend", None),
        ("cpu", "tensors are on npu, it runs on cpu"),
        ("reference", "triton_ascend comes first"),
    ]
