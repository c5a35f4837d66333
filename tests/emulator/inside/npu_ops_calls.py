"""On NPU tensors every op runs its Triton kernels by default, forward and backward.

Attention and grouped_linear run the vendor's operators, and Triton where these decline a call.
`pytest --device npu tests/ops` tests the results.
"""

import dataclasses
import importlib
import pkgutil

import pytest
import torch
from support import evaluate

import npu_ops
from npu_ops import ops
from npu_ops.core import env
from npu_ops.core.registry import launched_by

OPS = [
    module.name
    for module in pkgutil.iter_modules(ops.__path__)
    if importlib.import_module(f"npu_ops.ops.{module.name}.cases").REPRESENTATIVE
]
OF_VENDOR = ("attention", "grouped_linear")  # torch_npu's operators are preferred
CALLS = [(op, None, "triton_ascend") for op in OPS if op not in OF_VENDOR]
CALLS += [("attention", "mla-192-128", "aclnn"), ("attention", "softcap", "triton_ascend")]
CALLS += [("grouped_linear", None, "aclnn")]


@pytest.mark.parametrize("op, name, expected", CALLS)
def test_every_op_takes_a_kernel(op, name, expected):
    used = []

    def launch(table, chosen, args):
        used.append(chosen.name)
        chosen.launcher(*args)

    package, cases = (importlib.import_module(f"npu_ops.ops.{op}{of}") for of in ("", ".cases"))
    case = next(case for case in cases.CASES if case.name == (name or cases.REPRESENTATIVE[0]))
    inputs = dataclasses.replace(case, tokens=min(case.tokens, 8)).inputs(torch.bfloat16, "npu")
    wrt = getattr(case, "differentiable", cases.DIFFERENTIABLE)
    wrt = tuple(name for name in wrt if inputs.get(name) is not None)
    function = getattr(package, getattr(case, "function", package.__all__[0]))
    with env.override(strict=True), launched_by(launch):
        found = evaluate(function, inputs, wrt)
    assert set(used) == {expected}
    assert all(value.device.type == "npu" and value.isfinite().all() for value in found.values())


def test_explain_answers_for_npu_tensors():
    case = importlib.import_module("npu_ops.ops.rope.cases").CASES[0]
    verdicts = npu_ops.explain("apply_rotary_pos_emb", **case.inputs(torch.bfloat16, "npu"))
    said = {verdict.implementation: verdict.why_not for verdict in verdicts}
    assert said.pop("ascendc")  # Triton is preferred, or there are no headers
    assert "the vendor's operators take one dtype" in said.pop("aclnn")
    assert said == {
        "triton_ascend": None,
        "cpu": "tensors are on npu, it runs on cpu",
        "reference": "triton_ascend comes first",
    }
