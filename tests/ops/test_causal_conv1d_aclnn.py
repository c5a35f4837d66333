"""causal_conv1d by torch_npu's operator: equal to the reference on all cases it takes."""

import pytest
import torch
from npu_ops_tools import parity
from support import declined_by_vendor, forced, on_npu

import npu_ops
from npu_ops.core import cases, hardware
from npu_ops.core.compare import assert_close
from npu_ops.ops.causal_conv1d import aclnn

OP = "causal_conv1d"
CONV = npu_ops.causal_conv1d
CASES = [case for case in cases.of(OP).CASES if not case.large and case.tokens]


@pytest.fixture(autouse=True)
def ascend950(monkeypatch):
    """Pretend that the SoC is an Ascend 950, the only one with the operator.

    The emulated operator is the same for all SoCs.
    """
    monkeypatch.setattr(aclnn, "_soc_why_not", lambda: None)


def declined(case, monkeypatch, dtype=torch.bfloat16):
    return declined_by_vendor(aclnn, OP, CONV, case.inputs(dtype), monkeypatch)


@on_npu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_reference_over_all_cases_that_it_takes(device, dtype, monkeypatch):
    taken = [case for case in CASES if declined(case, monkeypatch) is None]
    assert {case.width for case in taken} == {2, 3} and {case.batch for case in taken} == {3}
    for case in taken:
        given = case.inputs(dtype, device)
        expected = parity.by_reference(CONV, given, ())
        with forced("aclnn", OP):
            actual = parity.evaluate(CONV, given, ())
        for name, value in actual.items():
            tolerance = cases.tolerance(OP, name, value, dtype)
            assert_close(f"{case.name} {name}", value, expected[name], tolerance)


def test_what_it_declines(monkeypatch):
    for case in CASES:
        why_not = declined(case, monkeypatch)
        if case.width > 3:
            assert why_not == f"the filter has {case.width} taps, the vendor's operator has 3"
        elif case.state:
            assert why_not == "the vendor's operator supports no states"
        elif case.lengths:
            assert why_not == "the vendor's operator takes no packed sequences"
        else:
            assert why_not is None
    assert "takes one dtype" in declined(CASES[-1], monkeypatch, torch.float32)


@pytest.mark.parametrize("soc, taken", [("Ascend950PR_9599", True), ("Ascend910B3", False)])
def test_it_is_of_one_generation(soc, taken, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "npu_name", lambda: soc)
    said = aclnn._soc_why_not.__wrapped__()
    assert (said is None) == taken and (
        taken or said == "the vendor's operator needs an Ascend950, this is Ascend910B3"
    )
