"""Test the adapters in every supported release of megatron-core; see megatron_checks."""

import sys
import types

import fetch_megatron
import megatron_checks
import pytest
from npu_ops_adapters.megatron import qwen3_vl
from processes import run_checks

ENDS = (fetch_megatron.VERSIONS[0], fetch_megatron.VERSIONS[-1])
USED = "0.16.1"  # the release in container images with Qwen3.5


def marks(version, mode):
    """Mark a release's tests. Releases in between are slow, unless an image uses them."""
    often = version in ENDS or (mode == "early" and version == USED)
    slow = [] if often else [pytest.mark.slow]
    return [pytest.mark.xdist_group(f"megatron-{version}-{mode}"), *slow]


RUNS = [
    pytest.param(version, mode, check, id=f"{version}-{mode}-{check}", marks=marks(version, mode))
    for version in fetch_megatron.VERSIONS
    for mode in megatron_checks.CHECKS
    for check in megatron_checks.names(mode, version)
]


@pytest.mark.parametrize("version, mode, check", RUNS)
def test_megatron(version, mode, check):
    report = run_checks(version, mode)
    error = report.get(check, report["stopped"])
    assert error is None, f"megatron-core {version}, {mode}:\n{error}"


def test_classes_that_a_later_bridge_has_not_are_not_asked_for(monkeypatch):
    name = f"{qwen3_vl._MODELLING}.text_model"
    before = [patch.target for patch in qwen3_vl.patches()]
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    targets = [patch.target for patch in qwen3_vl.patches()]
    assert [target for target in before if target not in targets] == [
        f"{name}:Qwen3VLTextRotaryEmbedding.forward",
        f"{name}:Qwen3VLMoETextRotaryEmbedding.forward",
    ]


def test_a_rope_that_an_earlier_bridge_has_not_is_not_asked_for(monkeypatch):
    """In Bridge 0.3 this module has only the tables' classes; layers call Megatron's rope."""
    name = f"{qwen3_vl._MODELLING}.rope"
    earlier = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, earlier)
    target = f"{name}:apply_rotary_pos_emb_absolute"
    # else a renamed function would go unnoticed
    assert target in [patch.target for patch in qwen3_vl.patches()]
    earlier.Qwen3VLMoETextRotaryEmbedding = type("Qwen3VLMoETextRotaryEmbedding", (), {})
    assert target not in [patch.target for patch in qwen3_vl.patches()]
