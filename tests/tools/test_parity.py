"""npu-ops parity passes correct implementations, and only these."""

import re

import pytest
import torch
from npu_ops_tools import parity
from npu_ops_tools.cli import app
from npu_ops_tools.where import ops
from typer.testing import CliRunner

from npu_ops.core.models import MODELS, divided
from npu_ops.core.registry import Table


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["parity", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_op_of_a_model(dtype):
    shown = call("--model", "qwen3.5-9b", "--tp", "4", "--tokens", "6", "--dtype", dtype)
    head, columns, *rows = shown.splitlines()
    assert head.startswith(f"qwen3.5-9b, {dtype}, cpu: ") and columns.startswith("op ")
    # the model has no experts
    assert {row.split()[0] for row in rows} == {*ops()} - {"grouped_linear"}
    assert all(re.fullmatch(r"(\S+ +){3}[01]\.\d\d +([01]\.\d\d|-)", row) for row in rows), rows
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_a_model_without_gated_delta_net_has_none():
    listed = [op for op, _ in parity.of_model(MODELS["qwen3-vl-8b"], 4)]
    assert "mrope" in listed and "l2norm" not in listed
    assert listed.count("attention") == 3  # text, decoding and vision tower


def test_some_ops():
    assert len(call("l2norm", "--model", "qwen3-next-80b-a3b", "--tokens", "4").splitlines()) == 3


@pytest.mark.parametrize("table, part", [("l2norm", "output 0"), ("l2norm_backward", "gradient")])
def test_what_is_wrong_is_said(monkeypatch, table, part):
    (native,) = [i for i in Table.tables[table].implementations if i.name == "cpu"]
    right = native.launcher

    def wrong(*args):
        right(*args)
        args[-1].mul_(1.2)

    monkeypatch.setitem(vars(native), "launcher", wrong)
    shown = call("l2norm", "--model", "qwen3.5-9b", "--tokens", "4", code=1)
    assert f"WRONG: {part}" in shown


def test_shapes_are_the_models():
    model = divided(MODELS["qwen3.5-9b"], 4)
    inputs = {(op, case.name): case.inputs(torch.float32) for op, case in parity.of_model(model, 3)}
    assert inputs["mrope", "text"]["mrope_section"] == [11, 11, 10]
    assert inputs["attention", "vision"]["q"].shape == (3, 4, 72)
    assert inputs["chunk_gated_delta_rule", "linear"]["v"].shape == (1, 3, 8, 128)
    assert inputs["causal_conv1d", "linear"]["x"].shape[-1] == 2048


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "gpt-2"], "model: got 'gpt-2', needs one of qwen2-vl-7b"),
        (["--tp", "5"], "tp: got 5, needs a divisor of 32 heads"),
        (["nope"], "ops: got nope, needs some of attention"),
    ],
)
def test_wrong_arguments(arguments, said):
    result = CliRunner().invoke(app, ["parity", *arguments])
    assert result.exit_code == 2 and said in result.output
    assert "errors relative to the tolerance" not in result.output  # the header of an empty table


@pytest.mark.parametrize("asked", [["l2norm"], ["rope", "l2norm"]])
def test_an_op_that_the_model_has_not_is_not_passed(asked):
    """No comparison ran, so the command must not succeed."""
    said = call(*asked, "--model", "qwen3-vl-8b", "--tokens", "4", code=2)
    assert "ops: got l2norm, which qwen3-vl-8b does not have" in said
