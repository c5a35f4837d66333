"""Calls that NPU kernels decline, from the DECLINED list of every op's `cases.py`."""

import pytest
import torch
from calls import CALLS
from npu_ops_tools.where import ops

import npu_ops
from npu_ops.core import ascendc, cases, hardware, library
from npu_ops.core.registry import as_if_on

DECLINED = [one for op in ops() for one in getattr(cases.of(op), "DECLINED", [])]


@pytest.fixture
def on_an_npu(monkeypatch):
    """Dispatch as on an NPU where all kernels are built."""
    monkeypatch.setattr(library, "triton_why_not", lambda: None)
    monkeypatch.setattr(hardware, "npu_name", lambda: "Ascend910B2")
    monkeypatch.setattr(ascendc, "_missing", lambda op, soc: None)
    with as_if_on("npu"):
        yield


@pytest.mark.parametrize("declined", DECLINED, ids=str)
def test_an_implementation_says_what_it_does_not_take(declined, on_an_npu):
    """Without the change, the implementation takes the call, or another one comes first."""
    call = CALLS[declined.call]

    def why_not(change):
        arguments = cases.changed(cases.changed(call.arguments(), declined.given), change)
        found = npu_ops.explain(call.function, **arguments)
        return next(v.why_not for v in found if v.implementation == declined.implementation)

    right = why_not({})
    assert right is None or right.endswith(" comes first")
    assert why_not(declined.change).startswith(declined.says)


def test_nothing_is_asked_for_an_npu_afterwards():
    rows = npu_ops.explain("l2norm", torch.ones(2, 8))
    assert next(row.implementation for row in rows if row.why_not is None) == "cpu"
