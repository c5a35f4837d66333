"""chunk_gated_delta_rule by torch_npu's operator: equal to the reference on all cases it takes."""

import itertools

import torch
from npu_ops_tools import parity
from support import declined_by_vendor, forced, on_npu

from npu_ops.core import cases
from npu_ops.core.compare import assert_close
from npu_ops.ops.chunk_gated_delta_rule import aclnn

OP = "chunk_gated_delta_rule"
CASES = [case for case in cases.of(OP).CASES if not case.large]


STATELESS = {"initial_state": None, "output_final_state": False}


def declined(case, monkeypatch, dtype=torch.bfloat16, **changes):
    """Return why the vendor's operator declines a case on an NPU with torch_npu, or None."""
    given = case.inputs(dtype) | changes
    return declined_by_vendor(aclnn, OP, cases.function(OP, case), given, monkeypatch)


@on_npu
def test_it_is_the_reference_over_all_cases_that_it_takes(device, monkeypatch):
    """The calls neither take nor return a state, and run with and without the L2 norms."""
    taken = [case for case in CASES if declined(case, monkeypatch, **STATELESS) is None]
    assert len(taken) > 5
    for case, norms in itertools.product(taken, (False, True)):
        function, given = cases.function(OP, case), case.inputs(torch.bfloat16, device)
        given |= STATELESS | ({"use_qk_l2norm_in_kernel": True} if norms else {})
        expected = parity.by_reference(function, given, ())
        with forced("aclnn", OP):
            actual = parity.evaluate(function, given, ())
        for name, value in actual.items():
            tolerance = cases.tolerance(OP, name, value, torch.bfloat16)
            assert_close(f"{case.name} {name}", value, expected[name], tolerance)


def test_what_it_declines(monkeypatch):
    """The reason follows from the case; the operator takes every other case."""
    for case in CASES:
        why_not = declined(case, monkeypatch)
        if case.chunk == 1:
            assert why_not == "the vendor's operator computes by chunks, not token by token"
        elif case.state != "none":
            assert why_not.startswith("states are float32")
        elif case.sequences:
            assert why_not.startswith("the vendor's operator takes no tokens after")
        elif max(case.keys, case.values) > 128 or max(case.heads, case.value_heads) > 64:
            assert why_not == "the vendor's operator takes at most 64 heads of 128 elements"
        else:
            assert why_not is None
    assert "takes bfloat16" in declined(CASES[0], monkeypatch, torch.float16)
