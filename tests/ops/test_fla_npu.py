"""fla_npu's operators, here a stand-in: equal to the reference on all cases they take."""

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
from npu_ops.ops.chunk_gated_delta_rule import cases as chunks

BFLOAT16 = torch.bfloat16
# Each op, and the first operator of fla_npu that it needs.
OPS = {
    "causal_conv1d": "npu_causal_conv1d",
    "chunk_gated_delta_rule": "npu_chunk_local_cumsum",
    "gated_delta_rule_update": "npu_recurrent_gated_delta_rule",
}


@pytest.fixture(autouse=True)
def known():
    yield
    library.fla_npu_why_not.cache_clear()


def cases_of(op):
    """Yield small cases that fla_npu takes: bf16 states, and chunks of its size."""
    if op == "chunk_gated_delta_rule":
        yield from CHUNKS
        return
    for case in cases.of(op).CASES:
        if not case.large and case.tokens:
            yield dataclasses.replace(case, pool=BFLOAT16) if hasattr(case, "pool") else case


CHUNKS = [
    chunks.Case("two-chunks", 128, 1, 2, 128, 128),
    chunks.Case("batch", 64, 2, 2, 128, 128, batch=2, state="none"),
    chunks.Case("values-first", 128, 1, 2, 128, 256, state="v", norms=True),
    chunks.Case("one-head", 192, 1, 1, 128, 128, state="v"),
]
DECLINED = {
    "there are 65 tokens": dataclasses.replace(CHUNKS[0], tokens=65),
    "K is 64 and V is 128": dataclasses.replace(CHUNKS[0], keys=64),
    "cu_seqlens are on the device": dataclasses.replace(CHUNKS[0], sequences=2),
}


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
        for name, value in actual.items():  # fla_npu rounds q, k and beta first
            tolerance = twice(cases.of(op).TOLERANCES)[BFLOAT16]
            assert_close(f"{case.name} {name}", value, expected[name], tolerance)


@pytest.mark.parametrize("op", OPS)
def test_without_it_or_with_another_one_it_is_declined_by_name(op, monkeypatch):
    case = next(iter(cases_of(op)))
    assert declined(op, case) == "fla_npu is not installed"
    operator = OPS[op]
    fla_npu_double.install(monkeypatch, **{operator: None})
    assert declined(op, case) == f"fla_npu has no {operator}"
    fla_npu_double.install(monkeypatch, **{operator: lambda bias, beta, conv_states, scale: None})
    said = declined(op, case)
    missing = {
        "causal_conv1d": "activation_mode, run_mode",
        "chunk_gated_delta_rule": "head_first",
        "gated_delta_rule_update": "num_accepted_tokens, g",
    }
    assert said.startswith(f"fla_npu's {operator} has no ") and said.endswith(missing[op])


@pytest.mark.parametrize("why", DECLINED)
def test_chunks_that_it_does_not_take_are_declined_by_name(why, monkeypatch):
    fla_npu_double.install(monkeypatch)
    assert declined("chunk_gated_delta_rule", DECLINED[why]).startswith(why)


def test_one_that_does_not_work_is_declined(monkeypatch):
    """Importing fla_npu raises without CANN. Dispatch must then decline it."""
    fla_npu_double.install(monkeypatch)
    monkeypatch.delattr(sys.modules["fla_npu.ops.ascendc"], "ASCENDC_CTYPES_OPS")
    case = next(iter(cases_of("causal_conv1d")))
    assert declined("causal_conv1d", case).startswith("fla_npu does not work: AttributeError")
