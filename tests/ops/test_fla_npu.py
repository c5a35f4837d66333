"""fla_npu's operators, of which there is a double here: as the reference over what they take."""

import dataclasses
import sys

import fla_npu_double
import pytest
import torch
from npu_ops_tools import parity
from support import forced, twice

from npu_ops.core import cases, library
from npu_ops.core.compare import assert_close
from npu_ops.core.registry import as_if_on, explain

BFLOAT16 = torch.bfloat16
OPS = ("causal_conv1d", "gated_delta_rule_update")


@pytest.fixture(autouse=True)
def known():
    yield
    library.fla_npu_why_not.cache_clear()


def cases_of(op):
    """Small ones; states in bf16, as its operator has them."""
    for case in cases.of(op).CASES:
        if not case.large and case.tokens:
            yield dataclasses.replace(case, pool=BFLOAT16) if hasattr(case, "pool") else case


def declined(op, case):
    with as_if_on("npu"), forced("fla_npu", op):
        verdicts = explain(cases.function(op, case), **case.inputs(BFLOAT16))
    return next(v.why_not for v in verdicts if v.implementation == "fla_npu")


@pytest.mark.parametrize("op", OPS)
def test_it_is_the_reference_over_all_cases_that_it_takes(op, monkeypatch):
    fla_npu_double.install(monkeypatch)
    taken = [case for case in cases_of(op) if declined(op, case) is None]
    assert len(taken) > 3
    for case in taken:
        function, given = cases.function(op, case), case.inputs(BFLOAT16)
        expected = parity.by_reference(function, given, ())
        with as_if_on("npu"), forced("fla_npu", op):
            actual = parity.evaluate(function, given, ())
        for name, value in actual.items():  # q, k and beta are rounded first
            tolerance = twice(cases.of(op).TOLERANCES)[BFLOAT16]
            assert_close(f"{case.name} {name}", value, expected[name], tolerance)


@pytest.mark.parametrize("op", OPS)
def test_without_it_or_with_another_one_it_is_declined_by_name(op, monkeypatch):
    case = next(iter(cases_of(op)))
    assert declined(op, case) == "fla_npu is not installed"
    operator = {"causal_conv1d": "npu_causal_conv1d"}.get(op, "npu_recurrent_gated_delta_rule")
    fla_npu_double.install(monkeypatch, **{operator: None})
    assert declined(op, case) == f"fla_npu has no {operator}"
    fla_npu_double.install(monkeypatch, **{operator: lambda bias, beta, conv_states, scale: None})
    said = declined(op, case)
    assert said.startswith(f"fla_npu's {operator} has no ") and said.endswith(
        "activation_mode, run_mode" if op == "causal_conv1d" else "num_accepted_tokens, g"
    )


def test_one_that_does_not_work_is_declined(monkeypatch):
    """As without CANN, where importing it raises."""
    fla_npu_double.install(monkeypatch)
    monkeypatch.delattr(sys.modules["fla_npu.ops.ascendc"], "ASCENDC_CTYPES_OPS")
    case = next(iter(cases_of("causal_conv1d")))
    assert declined("causal_conv1d", case).startswith("fla_npu does not work: AttributeError")
