"""`npu-ops doctor --trainer`: the problems that it lists for slime, relax and verl."""

import pytest
from npu_ops_adapters import State
from npu_ops_tools import doctor, trainers
from npu_ops_tools.cli import app
from typer.testing import CliRunner


def found(*absent, npus=8, bad=()):
    """Return what `doctor.collect` finds if all packages but `absent` are installed."""
    packages = {name: None if name in absent else "1.0" for name in doctor.PACKAGES}
    machine = {"npu devices": npus, "no npu because": "no device answers"}
    return {
        "packages": packages, "machine": machine, "known bad": list(bad),
        "torch_npu": "pip install torch_npu",
    }  # fmt: skip


def row(target, state=State.APPLIED, detail=""):
    sentence = f"{state}: {detail}" if detail else str(state)
    return {"target": target, "op": "rope", "state": str(state), "sentence": sentence}


def stops(name, *args, rows=(), **settings):
    return list(trainers.stops(trainers.TRAINERS[name], found(*args, **settings), list(rows)))


@pytest.mark.parametrize("name", trainers.TRAINERS)
def test_nothing_stops_it_where_all_is_there(name):
    assert stops(name, rows=[row("megatron.core.x:f"), row("verl.y:g", State.DISABLED)]) == []


def test_what_stops_it_comes_in_the_order_of_a_run():
    rows = [row("mindspeed.a:f"), row("slime.b:g", State.REFUSED, "another signature")]
    bad = [
        {"what": "torch 2.7.0 is wrong", "fix": "take 2.7.1"},
        {"what": "graphs are wrong", "fix": "make none", "when": "graphs"},
    ]
    assert stops("slime", "slime", "ray", "sglang", npus=None, bad=bad, rows=rows) == [
        "torch finds no NPU: no device answers",
        "torch 2.7.0 is wrong: take 2.7.1",
        "ray is not installed",
        "slime is not installed",
        "no rollout engine is installed: sglang",
        "slime lacks the patches that this trainer needs: refused: another signature",
    ]


def test_one_engine_is_enough():
    assert stops("verl", "sglang") == stops("verl", "vllm-ascend") == []
    assert stops("verl", "sglang", "vllm-ascend") == [
        "no rollout engine is installed: vllm-ascend or sglang"
    ]


def test_where_mindspeed_does_not_import_no_more_is_said_of_patches():
    rows, broken = [row("megatron.a:f", State.REFUSED)], "mindspeed does not import: KeyError: 'x'"
    given = trainers.TRAINERS["slime"], found(), rows
    assert list(trainers.stops(*given, broken)) == [broken]


def test_torch_npu_is_asked_for_by_its_command():
    assert stops("relax", "torch_npu") == ["torch_npu is not installed: pip install torch_npu"]


@pytest.mark.parametrize("name", trainers.TRAINERS)
def test_the_command_on_this_machine(name):
    """No trainer is installed where these tests run."""
    done = CliRunner().invoke(app, ["doctor", "--trainer", name])
    assert done.exit_code == 1
    assert f"{name} and its required packages" in done.output
    assert "  1. torch_npu is not installed: pip install" in done.output
    assert f". {name} is not installed" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_another_name_is_one_sentence():
    done = CliRunner().invoke(app, ["doctor", "--trainer", "trl"])
    assert done.exit_code == 2
    assert "--trainer: got 'trl', needs slime, relax, verl" in done.output
