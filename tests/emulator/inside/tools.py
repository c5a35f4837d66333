"""The tools list AscendC kernels, and name them as the implementation that runs if forced."""

import dataclasses
import logging

import pytest
import torch
import torch_npu  # noqa: F401
from npu_ops_tools import doctor, parity, where
from npu_ops_tools.bench import run

import npu_ops
from npu_ops.core import cases, env

FORCED = {"l2norm": "ascendc", "l2norm_backward": "ascendc"}


@pytest.fixture
def forced():
    with env.override(impl=FORCED):
        yield


def small_case():
    return dataclasses.replace(cases.of("l2norm").CASES[0], tokens=3)


def said_by_doctor() -> dict[tuple[str, str], str | None]:
    """Return doctor's reasons for the NPU: (op, implementation) -> why not."""
    return {(row["op"], row["implementation"]): row["why_not"]
            for row in doctor.implementations() if row["device"] == "npu"}  # fmt: skip


def test_doctor():
    assert doctor.machine()["emulated"]
    said = said_by_doctor()
    having = [op for op in where.ops() if "AscendC kernel" in where.where(op)]
    assert len(having) >= 8
    assert {said[op, "ascendc"] for op in having} == {"triton_ascend comes first"}


def test_doctor_of_what_is_forced(forced):
    said = said_by_doctor()
    assert said["l2norm", "ascendc"] is None
    assert said["l2norm", "triton_ascend"] == "NPU_OPS_IMPL forces ascendc"


def test_explain(forced):
    x = torch.randn(3, 64, device="npu")
    chosen = [row.implementation for row in npu_ops.explain("l2norm", x) if row.why_not is None]
    assert chosen == ["ascendc"]


def test_parity(forced):
    row = parity.measure("l2norm", small_case(), torch.bfloat16, "npu")
    assert (row.implementation, row.passed) == ("ascendc", True) and row.backward is not None


def test_shadow(forced, caplog):
    caplog.set_level(logging.INFO)
    with env.override(impl=FORCED, log="shadow:1"):
        npu_ops.l2norm(torch.randn(3, 64, device="npu"))
    assert any("l2norm: ascendc against reference" in line for line in caplog.messages)


def test_bench(forced):
    row = next(run.run(["l2norm"], quick=True, device="npu", longest=0.0))
    assert (row.device, row.provider, row.implementation) == ("npu-emulated", "npu-ops", "ascendc")
    assert row.command.startswith("NPU_OPS_IMPL=l2norm=ascendc,l2norm_backward=ascendc npu-ops")
    assert row.command.endswith("--device npu")
