"""A call like others before goes by a plan of theirs: the same results, with less to find out."""

import pytest
import torch
from npu_ops_tools.verify.checks import one_mask
from npu_ops_tools.where import ops
from support import devices, evaluate

import npu_ops
from npu_ops.core import cases, env, library, plans
from npu_ops.core.registry import Table

SMALL = [
    pytest.param(op, case, id=f"{op}-{case.name}")
    for op in ops()
    for case in cases.of(op).CASES
    if not case.large
]
# Index values decide what the others' calls do, or they write over a state.
PLANNED = {
    "attention", "bias_dropout_add", "causal_conv1d", "causal_conv1d_qkv", "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule", "gdn_gate", "l2norm", "mrope", "qk_norm_rope",
    "rms_norm_gated", "rope",
}  # fmt: skip


@pytest.fixture(autouse=True, params=[True, False], ids=["C++", "Python"])
def begin(request, monkeypatch):
    """As with what makes known calls in C++, and without."""
    if not request.param:
        monkeypatch.setattr(library, "known", lambda: None)
    plans.forget()


@pytest.fixture
def selected(monkeypatch):
    """The operators whose implementation was searched for."""
    found, select = [], Table.select

    def noted(table, *args):
        found.append(table.op)
        return select(table, *args)

    monkeypatch.setattr(Table, "select", noted)
    return found


def results(op, case, seed, device="cpu"):
    """Of other contents for each seed, in other memory."""
    inputs = case.inputs(torch.bfloat16, device, seed)
    wrt = [x for x in cases.differentiable(op, case) if inputs.get(x) is not None]
    with one_mask():
        return evaluate(cases.function(op, case), inputs, wrt)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("op, case", SMALL)
def test_a_plan_computes_what_a_first_call_does(op, case, device):
    kept = [results(op, case, seed, device) for seed in (0, 1)]
    found = results(op, case, 2, device)
    plans.forget()
    expected = results(op, case, 2, device)
    assert len(kept) == 2 and found.keys() == expected.keys()
    for name, value in found.items():
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]) or value.isnan().any(), name


def test_which_ops_have_plans(selected):
    """Forward and backward."""
    planned = set()
    for op, case in (parameter.values for parameter in SMALL):
        plans.forget()
        times = []
        for seed in (0, 1, 2):
            selected.clear()
            results(op, case, seed)
            times.append(len(selected))
        if times[1] and not times[2]:
            planned.add(op)
    assert planned == PLANNED


def test_one_tensor_for_two_arguments_makes_no_plan():
    x, z = torch.randn(2, 3, 8).unbind()
    weight = torch.ones(8)
    for _ in range(3):
        npu_ops.rms_norm_gated(x, weight, x)
    found = npu_ops.rms_norm_gated(x, weight, z)
    plans.forget()
    assert torch.equal(found, npu_ops.rms_norm_gated(x, weight, z))


def test_what_is_chosen_by_may_change(selected):
    x = torch.randn(3, 8)
    for _ in range(3):
        npu_ops.l2norm(x)
    selected.clear()
    npu_ops.l2norm(x)
    assert selected == []
    with env.override(impl={"l2norm": "reference"}):
        npu_ops.l2norm(x)
    npu_ops.l2norm(x)
    assert selected == ["l2norm", "l2norm"]


def test_many_shapes_are_forgotten():
    """A model with ever new lengths keeps no plan for each."""
    known = plans.Plans(tensors=1, seeds=(), lists=False)
    x = torch.ones(300, 4)
    for rows in range(1, 301):
        inputs = (x[:rows],)
        known.keep(known.key_of(inputs), inputs, [x[:rows]], [x[:rows]], chosen=None)
    assert len(known._plans) <= plans._MOST
