"""The environment switches: how values are parsed, and that ENVS.md documents them."""

import os
import pathlib
import subprocess
import sys

import pytest

from npu_ops.core import env

ROOT = pathlib.Path(__file__).parents[2]


def test_defaults():
    assert env.read({}) == env.Settings(
        impl={}, strict=False, consistent="", disable=frozenset(), log="once"
    )


@pytest.mark.parametrize(
    "variable, text, field, value",
    [
        ("NPU_OPS_IMPL", "rope=reference", "impl", {"rope": "reference"}),
        (
            "NPU_OPS_IMPL",
            " rope=cpu , mrope=triton_ascend,",
            "impl",
            {"rope": "cpu", "mrope": "triton_ascend"},
        ),
        ("NPU_OPS_IMPL", "", "impl", {}),
        ("NPU_OPS_STRICT", "1", "strict", True),
        ("NPU_OPS_CONSISTENT", "1", "consistent", "tokens"),
        ("NPU_OPS_CONSISTENT", "chunks", "consistent", "chunks"),
        ("NPU_OPS_STRICT", "0", "strict", False),
        ("NPU_OPS_STRICT", "", "strict", False),
        ("NPU_OPS_DISABLE", "rope, mrope", "disable", frozenset({"rope", "mrope"})),
        ("NPU_OPS_DISABLE", "all", "disable", frozenset({"all"})),
        ("NPU_OPS_LOG", "off", "log", "off"),
        ("NPU_OPS_LOG", "calls", "log", "calls"),
        ("NPU_OPS_LOG", "shadow:20", "log", "shadow:20"),
    ],
)
def test_values(variable, text, field, value):
    settings = env.read({variable: text})
    assert getattr(settings, field) == value
    others = {s.field for s in env.SWITCHES} - {field}
    assert all(getattr(settings, other) == getattr(env.read({}), other) for other in others)


@pytest.mark.parametrize(
    "variable, text",
    [
        ("NPU_OPS_IMPL", "rope"),
        ("NPU_OPS_IMPL", "rope="),
        ("NPU_OPS_IMPL", "=cpu"),
        ("NPU_OPS_IMPL", "rope=cpu,mrope"),
        ("NPU_OPS_STRICT", "yes"),
        ("NPU_OPS_STRICT", "true"),
        ("NPU_OPS_STRICT", "2"),
        ("NPU_OPS_LOG", "debug"),
        ("NPU_OPS_LOG", "Once"),
        ("NPU_OPS_LOG", "1"),
        ("NPU_OPS_LOG", "shadow"),
        ("NPU_OPS_LOG", "shadow:0"),
        ("NPU_OPS_LOG", "shadow:-1"),
        ("NPU_OPS_LOG", "calls:2"),
    ],
)
def test_what_does_not_parse_is_an_error_that_names_the_variable(variable, text):
    with pytest.raises(ValueError, match=f"^{variable}: got "):
        env.read({variable: text})


def test_shadow_is_a_number_of_calls():
    assert env.read({"NPU_OPS_LOG": "shadow:20"}).shadow == 20
    assert env.read({}).shadow == env.read({"NPU_OPS_LOG": "calls"}).shadow == 0


def test_a_wrong_switch_stops_the_import():
    done = subprocess.run(
        [sys.executable, "-c", "import npu_ops"], capture_output=True, text=True,
        env=os.environ | {"NPU_OPS_STRICT": "maybe"},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.strip().endswith("ValueError: NPU_OPS_STRICT: got 'maybe', needs 0 or 1")


@pytest.mark.parametrize(
    "package, variable, text, got",
    [
        ("npu_ops", "NPU_OPS_IMPL", "ropee=cpu", "got the op 'ropee', needs one of add_rms_norm, "),
        ("npu_ops", "NPU_OPS_IMPL", "rope=cpuu", "got rope=cpuu, needs one of triton_ascend, "),
        ("npu_ops_adapters", "NPU_OPS_DISABLE", "nosuch", "got 'nosuch', needs one of all, "),
        ("npu_ops_adapters", "NPU_OPS_DISABLE", "rope,mrop", "got 'mrop', needs one of all, "),
    ],
)
def test_a_switch_that_names_what_there_is_not_stops_the_import(package, variable, text, got):
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], capture_output=True, text=True,
        env=os.environ | {variable: text},
    )  # fmt: skip
    assert done.returncode != 0 and f"ValueError: {variable}: {got}" in done.stderr


def test_switches_reach_the_ops():
    program = (
        "import torch, npu_ops; x = torch.ones(2); npu_ops.bias_dropout_add(x, None, x, 0, False)"
    )
    switches = {"NPU_OPS_IMPL": "bias_dropout_add=reference", "NPU_OPS_LOG": "calls"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | switches,
    )
    assert done.stderr.strip().endswith("-> reference")


def test_override_is_undone():
    before = env.settings
    with pytest.raises(KeyError), env.override(strict=True, impl={"rope": "cpu"}) as inside:
        assert env.settings is inside and inside.strict and inside.log == before.log
        raise KeyError
    assert env.settings is before


def test_envs_md_is_generated_from_the_code():
    """If it fails: python npu_ops/core/env.py > ENVS.md"""
    assert (ROOT / "ENVS.md").read_text() == env.markdown()


def test_envs_md_names_every_switch():
    for switch in env.SWITCHES:
        assert f"| `{switch.variable}` |" in env.markdown()
