"""Cached dispatch decisions: results are the same as without the cache, and no tensor is kept."""

import gc

import pytest
import torch
from npu_ops_tools.verify.checks import one_mask
from npu_ops_tools.where import ops
from support import devices, evaluate

import npu_ops
from npu_ops.core import cases, decisions, env, preferences
from npu_ops.core.decisions import Decision, Decisions
from npu_ops.core.registry import Implementation, Table, as_if_on, launched_by
from npu_ops.ops.l2norm import op as l2norm_op

FORWARD = l2norm_op.forward


def known() -> list[Decision]:
    return list(FORWARD._decisions._found.values())


@pytest.fixture
def chosen():
    """Return a function that calls l2norm and returns the implementations that ran."""
    FORWARD._decisions._found.clear()
    names = []

    def launch(table, chosen, args):
        names.append(chosen.name)
        chosen.launcher(*args)

    def call(*args, **settings):
        del names[:]
        with launched_by(launch):
            npu_ops.l2norm(*args, **settings)
        return names

    return call


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("op", ops())
def test_a_decision_computes_what_the_first_call_does(op, device):
    """Repeated calls give the first call's results. Unwritten elements would be NaN."""
    case = next(case for case in cases.of(op).CASES if not case.large)
    function, wrt = cases.function(op, case), cases.differentiable(op, case)

    def results(seed):
        inputs = case.inputs(torch.float32, device, seed)
        with one_mask():
            found = evaluate(function, inputs, [n for n in wrt if inputs.get(n) is not None])
        return found | {f"{n} after": x for n, x in inputs.items() if torch.is_tensor(x)}

    first = results(0)
    for seed in (1, 1, 0):
        again = results(seed)
    assert again.keys() == first.keys()
    for name, value in again.items():
        assert torch.equal(value.nan_to_num(7), first[name].nan_to_num(7)), name
        assert value.stride() == first[name].stride(), name


def test_a_call_is_decided_once(chosen, monkeypatch):
    x = torch.randn(3, 8)
    chosen(x)
    monkeypatch.setattr(FORWARD, "lay_out", None)  # a new decision would call it
    assert chosen(torch.randn(3, 8)) == ["cpu"]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:2],
        lambda x: x.t().contiguous().t(),
        lambda x: x.bfloat16(),
        lambda x: x[:, None],
    ],
    ids=["shape", "stride", "dtype", "dimensions"],
)
def test_another_key_is_decided_anew(chosen, other):
    x = torch.randn(3, 8)
    chosen(x)
    chosen(other(x))
    assert len(known()) == 2
    chosen(x, eps=1e-3)
    assert len(known()) == 3


def test_what_implementations_are_chosen_by_is_in_the_key(chosen):
    x = torch.randn(3, 8)
    assert chosen(x) == ["cpu"]
    with env.override(impl={"l2norm": "reference"}):
        assert chosen(x) == ["reference"] and chosen(x) == ["reference"]
    assert chosen(x) == ["cpu"]
    before = len(known())
    with as_if_on("meta"):
        assert chosen(x) == ["reference"]
    assert chosen(x) == ["cpu"] and len(known()) > before


def test_a_copied_argument_is_copied_each_time(chosen):
    """Such a call is not cached, because a cached decision would keep the first call's copy."""
    for _ in range(3):
        x = torch.randn(3, 16)[:, ::2]
        torch.testing.assert_close(npu_ops.l2norm(x), npu_ops.l2norm(x.contiguous()))
    copied, _ = known()
    assert copied is None


def test_one_tensor_for_two_arguments(chosen):
    x, bias, residual = (torch.randn(n, 8) for n in (3, 1, 3))
    for _ in range(3):
        npu_ops.bias_dropout_add(x, bias[0], x, 0.0, True)
    found = npu_ops.bias_dropout_add(x, bias[0], residual, 0.0, True)
    torch.testing.assert_close(found, x + bias + residual)


def test_keys_are_bounded(chosen, monkeypatch):
    monkeypatch.setattr(decisions, "MOST", 4)
    for rows in range(1, 12):
        chosen(torch.randn(rows, 8))
        assert len(known()) <= 4


def test_no_tensor_is_kept(chosen):
    chosen(torch.randn(3, 8))
    seen, todo = set(), [vars(decision) for decision in known()]
    while todo:
        for x in gc.get_referents(todo.pop()):
            if id(x) not in seen and x is not FORWARD.table.implementations:
                assert not isinstance(
                    x, torch.Tensor | torch.UntypedStorage | torch.autograd.Function
                )
                seen.add(id(x))
                if isinstance(x, (tuple, list, dict, decisions.Output, decisions.View)):
                    todo.append(x)
    assert seen


def test_index_values_are_checked_in_each_call():
    x = torch.randn(2, 3, 2, 8)
    cos, sin = torch.randn(2, 4, 8)
    for _ in range(3):
        npu_ops.apply_rotary_pos_emb(x, None, cos, sin, torch.zeros(2, 3).long(), layout="BSND")
    operator = torch.ops.npu_ops.rope.default
    args = x, x[:, :, :0], cos[None], sin[None]
    rest = "BSND", "half", False, 8
    operator(*args, torch.zeros(2, 3).long(), *rest)
    with pytest.raises(ValueError, match="positions: got 4 to 4, needs 0 to 3"):
        operator(*args, torch.full((2, 3), 4), *rest)


def test_a_key_tells_lists_and_missing_tensors_apart():
    x, y = torch.ones(2), torch.ones(2)
    keys = Decisions(2)
    assert keys.key((x, None, [1, 2])) == keys.key((y, None, [1, 2]))
    others = [(x, y, [1, 2]), (None, x, [1, 2]), (x, None, [1, 3])]
    assert len({keys.key(inputs) for inputs in others} | {keys.key((x, None, [1, 2]))}) == 4


def test_a_vendor_operator_that_is_asked_first_is_asked_each_time(monkeypatch):
    """A preferred implementation may decline only some calls, so its decision is not cached."""
    monkeypatch.setattr(Table, "tables", {})
    monkeypatch.setattr(preferences, "implementations", {})

    def one(name, why_not=None):
        return Implementation(name, lambda: None, frozenset(), lambda *args: why_not)

    table = Table("op", [one("triton_ascend"), one("aclnn", "captured"), one("reference")])
    args = (torch.ones(2),)
    assert table.always_chooses(table.select(*args), args)
    monkeypatch.setattr(table, "_preferred", lambda device, args: "aclnn")
    assert table.select(*args).name == "triton_ascend"
    assert not table.always_chooses(table.select(*args), args)
