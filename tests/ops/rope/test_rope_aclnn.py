"""rope by torch_npu's operators: equal to the reference on all cases they take."""

import pytest
import torch
from npu_ops_tools import parity
from support import declined_by_vendor, devices, forced, on_npu, parametrize_dtypes

import npu_ops
from npu_ops.core import cases
from npu_ops.core.compare import assert_close
from npu_ops.ops.rope import aclnn

CASES = [case for case in cases.of("rope").CASES if not case.large]
ROPE = npu_ops.apply_rotary_pos_emb
WRT = ("q", "k")


def inputs(case, dtype, device="cpu", **changes):
    """Return a case's inputs with tables in the dtype of q and k."""
    given = case.inputs(dtype, device)
    return given | {name: given[name].to(dtype) for name in ("cos", "sin")} | changes


def declined(given, monkeypatch):
    """Return why the vendor's operators decline a call on an NPU with torch_npu, or None."""
    return declined_by_vendor(aclnn, "rope", ROPE, given, monkeypatch)


def named_case(name):
    return next(case for case in CASES if case.name == name)


@on_npu
@parametrize_dtypes()
@pytest.mark.parametrize("inverse", [False, True])
def test_it_is_the_reference_over_all_cases_that_it_takes(device, dtype, inverse, monkeypatch):
    left = set()
    for case in CASES:
        given = inputs(case, dtype, device, inverse=inverse)
        if declined(given, monkeypatch):
            left.add(case.name)
            continue
        expected = parity.by_reference(ROPE, given, WRT)
        with forced("aclnn", "rope"):
            actual = parity.evaluate(ROPE, given, WRT)
        for name, value in actual.items():
            assert_close(f"{case.name} {name}", value, expected[name], tolerance(value))
    pairs = (c for c in CASES if c.pair_layout == "interleaved" and c.layout != "TND")
    assert left == {case.name for case in pairs if case.batch > 1}


def tolerance(value):
    return cases.tolerance("rope", "output 0", value, value.dtype)


@on_npu
def test_in_place_and_without_k(device):
    case = named_case("qwen3-vl-8b-tp1-t64")
    given = inputs(case, torch.bfloat16, device)
    expected = ROPE(**given)
    with forced("aclnn", "rope"):
        ROPE(**given | {"q": given["q"].clone(), "k": None})
        written = given | {"q": given["q"].clone(), "k": given["k"].clone(), "inplace": True}
        q, k = ROPE(**written)
        alone, nothing = ROPE(**given | {"k": None})
    assert q is written["q"] and k is written["k"] and nothing is None
    for name, one, other in (("q", q, expected[0]), ("k", k, expected[1]), ("q", alone, q)):
        assert_close(name, one.cpu(), other.cpu().double(), tolerance(one))


@pytest.mark.parametrize(
    "name, dtype, changes, said",
    [
        ("qwen3-vl-8b-tp1-t64", torch.float32, {}, None),
        ("head-96-half-half-table", torch.bfloat16, {}, None),
        ("head-96-interleaved-half-table", torch.bfloat16, {}, "cos and sin differ by sequence"),
        ("qwen3-vl-8b-tp1-t64", torch.float64, {}, "it has no float64 kernel"),
    ],
)
def test_what_it_declines(name, dtype, changes, said, monkeypatch):
    why_not = declined(inputs(named_case(name), dtype) | changes, monkeypatch)
    assert why_not == said if said is None else said in why_not


def test_tables_of_another_dtype_are_declined(monkeypatch):
    """torch_npu's operators would round the tables; our kernels and the reference never do."""
    given = named_case("qwen3-vl-8b-tp1-t64").inputs(torch.bfloat16)
    assert "are bfloat16, bfloat16, float32, float32" in declined(given, monkeypatch)


def test_positions_are_declined(monkeypatch):
    given = {
        "q": torch.zeros(1, 3, 2, 8), "k": None, "cos": torch.zeros(9, 8),
        "sin": torch.zeros(9, 8), "position_ids": torch.tensor([[1, 2, 3]]), "layout": "BSND",
    }  # fmt: skip
    assert declined(given, monkeypatch) == "the vendor's operators take no positions"


def test_without_torch_npu_it_says_so():
    if "npu" not in devices():
        assert aclnn._missing() == "torch_npu has no npu_rotary_mul"
    else:
        assert aclnn._missing() is None
