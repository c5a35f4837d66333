"""gated_delta_rule_update by torch_npu's operator: equal to the reference on all cases it takes."""

import dataclasses

import pytest
import torch
from npu_ops_tools import parity
from support import declined_by_vendor, forced, on_device, on_npu, twice

import npu_ops
from npu_ops.core import cases
from npu_ops.core.compare import assert_close
from npu_ops.ops.gated_delta_rule_update import aclnn

OP = "gated_delta_rule_update"
UPDATE = npu_ops.gated_delta_rule_update
BFLOAT16 = torch.bfloat16
# The cases with their pools in bf16, as the operator needs them.
CASES = [dataclasses.replace(case, pool=BFLOAT16) for case in cases.of(OP).CASES if not case.large]
# The operator reads q, k and beta rounded to bf16.
TOLERANCE = twice(cases.of(OP).TOLERANCES)[BFLOAT16]


def declined(given, monkeypatch):
    return declined_by_vendor(aclnn, OP, UPDATE, given, monkeypatch)


def named_case(name):
    return next(case for case in CASES if case.name == name)


@on_npu
def test_it_is_the_reference_over_all_cases_that_it_takes(device, monkeypatch):
    """Compare o and the pool."""
    taken = [case for case in CASES if declined(case.inputs(BFLOAT16), monkeypatch) is None]
    assert {case.mode for case in taken} == {"decode", "vllm"}
    assert {case.v_first for case in taken} == {True, False} and len(taken) > 8
    for case in taken:
        given = case.inputs(BFLOAT16, device) | {"softplus_beta": 2.0}
        expected = parity.by_reference(UPDATE, given, ())
        with forced("aclnn", OP):
            actual = parity.evaluate(UPDATE, given, ())
        for name, value in actual.items():
            assert_close(f"{case.name} {name}", value, expected[name], TOLERANCE)


@on_npu
@pytest.mark.parametrize("name", ["decode", "vllm"])
def test_what_is_in_no_slot_is_left_alone(name, device):
    """The pool keeps its bits. With slot -1, o is 0; with a slot past the pool, o is NaN."""
    given = named_case(name).inputs(BFLOAT16, device)
    slots = given["state_indices"]
    before = given["state"].clone()
    with forced("aclnn", OP):
        o = UPDATE(**given | {"state_indices": torch.full_like(slots, -1)})
        assert not o.any() and torch.equal(given["state"], before)
        o = UPDATE(**given | {"state_indices": torch.full_like(slots, len(before))})
        assert o.isnan().all() and torch.equal(given["state"], before)


@on_npu
def test_the_pool_can_be_left_as_it_is(device):
    given = named_case("vllm").inputs(BFLOAT16, device)
    before = given["state"].clone()
    with forced("aclnn", OP):
        UPDATE(**given | {"disable_state_update": True})
    assert torch.equal(given["state"], before)


@pytest.mark.parametrize(
    "name, dtype, changes, said",
    [
        ("decode", BFLOAT16, {}, None),
        ("decode-k-first", BFLOAT16, {}, None),
        ("vllm", BFLOAT16, {}, None),
        ("decode", torch.float16, {}, "q is float16, the vendor's operator takes bfloat16"),
        ("decode", BFLOAT16, {"pool": torch.float32}, "states are float32"),
        ("ragged", BFLOAT16, {}, "no empty sequence"),
        ("sglang", BFLOAT16, {}, "no intermediate states"),
        (
            "vllm-t17",
            BFLOAT16,
            {},
            "sequences have 17 tokens, the vendor's operator takes at most 8",
        ),
    ],
)
def test_what_it_declines(name, dtype, changes, said, monkeypatch):
    given = dataclasses.replace(named_case(name), **changes).inputs(dtype)
    why_not = declined(on_device(given, "cpu"), monkeypatch)
    assert why_not == said if said is None else said in why_not
