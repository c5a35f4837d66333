"""npu-ops doctor: its text for each state of patches, in 80 columns, and its exit status."""

import re
import subprocess
import sys

import npu_ops_adapters
import pytest
import torch
from npu_ops_adapters import State
from npu_ops_tools import doctor, known_bad, where
from npu_ops_tools.cli import app
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from typer.testing import CliRunner

from npu_ops.core import env

HOME = "transformers.models.qwen3.modeling_qwen3"
ROPE = f"{HOME}:apply_rotary_pos_emb"
SOUND = {"torch": "2.13.0+cpu", "triton-ascend": "3.2.0", "pybind11": "3.1.0"}
CANN = {"ASCEND_TOOLKIT_HOME": "cann"}


@pytest.fixture
def only_qwen3(monkeypatch):
    """Make doctor look at only one module of one framework."""
    watched = frozenset({HOME})
    monkeypatch.setattr(npu_ops_adapters, "modules", lambda: watched)
    monkeypatch.setattr(npu_ops_adapters, "load_plugins", lambda: None)


def rope(found):
    (row,) = [row for row in found if row["target"] == ROPE]
    return row


def found_with(**changes):
    """Return what `doctor.collect` returns, with `changes`; no framework is needed."""
    return {
        "machine": doctor.machine(), "packages": dict.fromkeys(doctor.PACKAGES), "known bad": [],
        "build": {"why_not": None, "broken": False, "compiler": "g++", "cann": None},
        "switches": {},
        "implementations": [], "patches": [], "preferences": [], "not in force": [],
        "support": "tested",
    } | changes  # fmt: skip


ALONE = """
import importlib.machinery, sys

class Alone(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in FRAMEWORKS
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Alone
sys.argv[1:] = ["doctor"]
from npu_ops_tools.__main__ import main
main()
"""
FRAMEWORKS = {*map(doctor._package, npu_ops_adapters.modules()), "megatron", "fla", "peft"}


def test_an_environment_without_any_framework():
    code = f"FRAMEWORKS = {FRAMEWORKS!r}{ALONE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"([\w.]+), \d+ patches: (.+)", done.stdout))
    assert {"transformers", "sglang", "vllm"} <= found.keys()
    assert set(found.values()) == {"not installed"}


# Patches


def test_an_applied_patch(applied, only_qwen3):
    row = rope(doctor.patches())
    assert (row["state"], row["sentence"], row["removable"]) == ("applied", "applied", True)
    assert row["why"] and row["remove_when"]


def test_who_overwrote_it(applied, only_qwen3, tmp_path, monkeypatch):
    (tmp_path / "rival.py").write_text(
        f"import {HOME} as home\ndef rival(q, k, cos, sin): return q, k\n"
        "home.apply_rotary_pos_emb = rival\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ours = qwen3.apply_rotary_pos_emb
    try:
        row = rope(doctor.patches(["rival"]))
    finally:
        qwen3.apply_rotary_pos_emb = ours
        del sys.modules["rival"]
    assert (row["state"], row["detail"]) == ("overwritten by", "rival.rival")
    assert not row["removable"]
    assert list(doctor.not_in_force(found_with(patches=[row]))) == [
        f"{ROPE} (rope): overwritten by rival.rival"
    ]


def test_which_modules_were_too_early(applied, only_qwen3, tmp_path, monkeypatch):
    (tmp_path / "early.py").write_text(
        f"import {HOME} as home\nkept = home.apply_rotary_pos_emb.__wrapped__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        row = rope(doctor.patches(["early"]))
    finally:
        del sys.modules["early"]
    assert row["sentence"] == "captured too early by early"
    assert row["removable"]


def test_one_that_is_refused(only_qwen3, monkeypatch):
    npu_ops_adapters.revert()
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", lambda x, angles: x)
    npu_ops_adapters.apply()
    try:
        row = rope(doctor.patches())
    finally:
        npu_ops_adapters.revert()
    assert row["state"] == "refused" and "got (x, angles)" in row["detail"]
    assert not row["removable"]


def test_adapters_that_were_not_registered(only_qwen3):
    npu_ops_adapters.revert()
    row = rope(doctor.patches())
    assert row["state"] == "apply"
    (sentence,) = doctor.not_in_force(found_with(patches=[row]))
    assert sentence.endswith("TORCH_DEVICE_BACKEND_AUTOLOAD=0?)")


def test_what_is_switched_off_or_not_there_is_not_amiss(only_qwen3):
    npu_ops_adapters.revert()
    with env.override(disable=frozenset({"rope"})):
        row = rope(doctor.patches())
    absent = row | {"state": "not in this version"}
    assert row["state"] == "disabled by NPU_OPS_DISABLE"
    assert list(doctor.not_in_force(found_with(patches=[row, absent]))) == []


def test_a_module_that_this_version_has_not():
    found = doctor._import_frameworks(["transformers.models.gone.modeling_gone", "no_such.thing"])
    assert found == {
        "transformers.models.gone.modeling_gone": (doctor.Missing.MODULE, ""),
        "no_such.thing": (doctor.Missing.PACKAGE, ""),
    }


# Implementations that the user forced


@pytest.mark.parametrize(
    "impl, sentence",
    [
        ({"rope": "cpu"}, None),
        ({"rope_backward": "cpu"}, None),
        ({"add_rms_norm": "cpu"}, None),
        (
            {"rope": "triton_ascend"},
            ("NPU_OPS_IMPL=rope=triton_ascend: this implementation runs on no device here"),
        ),
        ({"rope": "aclnn"}, "NPU_OPS_IMPL=rope=aclnn: this implementation runs on no device here"),
        (
            {"attention": "aclnn"},
            ("NPU_OPS_IMPL=attention=aclnn: this implementation runs on no device here"),
        ),
        ({"nope": "cpu"}, "NPU_OPS_IMPL=nope=cpu: there is no such op"),
    ],
)
def test_an_implementation_that_was_asked_for(impl, sentence):
    with env.override(impl=impl):
        found = found_with(implementations=doctor.implementations())
        assert list(doctor.not_in_force(found)) == ([sentence] if sentence else [])


# Known-bad versions


def always(versions, environ):
    """Return the problems that affect every program."""
    return [found for found in known_bad.problems(versions, environ) if not found["when"]]


@pytest.mark.parametrize(
    "versions, environ, what, fix",
    [
        ({"triton": "3.7.0"}, {}, "share one folder", "pip uninstall -y triton triton-ascend"),
        ({"torch_npu": "2.8.0"}, CANN, ("another version of torch than "
        "2.13.0"), "torch_npu==2.13.0.*"),
        ({"torch_npu": "2.13.0"}, {}, "CANN is not in the environment", "set_env.sh"),
        (
            {"torch_npu": "2.13.0", "sglang": "0.5.23"}, CANN, "the server does not start",
            "triton-ascend 3.2.1",
        ),
        ({}, CANN | {"ASCEND_HOME_PATH": "other"}, "two versions of CANN", "of one CANN"),
        ({"pybind11": None}, {}, "without pybind11", "pip install pybind11"),
        ({}, {"TRITON_ALL_BLOCKS_PARALLEL": "1"}, "wait for each other", "unset TRITON_ALL"),
    ],
)  # fmt: skip
def test_known_bad_combinations(versions, environ, what, fix):
    (problem,) = always(SOUND | versions, environ)
    assert what in problem["what"] and fix in problem["fix"] and problem["source"]


@pytest.mark.parametrize("versions", [SOUND, SOUND | {"torch_npu": "2.13.0.post2"}, {}])
def test_sound_combinations(versions):
    assert always(versions, CANN) == []


def test_a_slice_that_torch_writes_to_another_place():
    """The program in docs/help.md uses only torch; its result is wrong on the listed versions."""
    text = (where.ROOT / "docs/help.md").read_text().partition("## Faults of torch")[2]
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert "npu_ops" not in program
    names = {}
    exec(program, names)
    written = [float(part.mean()) for part in names["pool"].unbind(1)]
    known = [found for found in known_bad.problems({"torch": torch.__version__}) if found["when"]]
    assert written == ([1, 0] if known else [0, 1])
    for found in known:
        assert found["when"] in found["what"] and found["source"].startswith("docs/help.md")
        torch._dynamo.reset()
        with torch._inductor.config.patch(enable_auto_functionalized_v2=False):  # the workaround
            torch.compile(names["write"], dynamic=True)(names["pool"].zero_())
        assert [float(part.mean()) for part in names["pool"].unbind(1)] == [0, 1]


@pytest.mark.parametrize("version, known", [("2.12.1", 0), ("2.13.0+cpu", 1), ("2.14.0", 0)])
def test_a_fault_of_some_calls_is_said_and_is_no_fault_of_the_machine(version, known):
    bad = list(known_bad.problems({"torch": version}))
    assert len(bad) == known and all(found["when"] for found in bad)
    text = doctor.text(found_with() | {"known bad": bad})
    assert text.count("KNOWN BAD: torch.compile(dynamic=True) of torch 2.13") == known
    assert "nothing amiss" in text


@pytest.mark.parametrize("version, release", [("2.9.1", "2.9.1"), ("2.13.0+cpu", "2.13.0"),
                                              ("2.10.0a0+git", "2.10.0")])  # fmt: skip
def test_the_command_for_torch_npu_leaves_torch_as_it_is(version, release):
    command = known_bad.install_torch_npu(version)
    assert command.startswith(f"pip install --no-deps 'torch_npu=={release}.*'")
    assert command in " ".join(doctor.text(found_with(torch_npu=command)).split())
    (problem,) = always({"torch": version, "torch_npu": "2.1.0"}, CANN)
    assert command in problem["fix"]
    # no extra in pyproject.toml may pin torch_npu's version
    assert "torch_npu" not in (where.ROOT / "pyproject.toml").read_text()


def test_the_version_of_cann(monkeypatch, tmp_path):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("package=compiler\nVersion=8.5.0\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert doctor.machine()["CANN"] == f"8.5.0 ({tmp_path})"


# The report as text


MODULES = [f"a.b.module_{n}" for n in range(30)]
MANY = (  # states, and parts of their text
    (State.APPLIED, "", "host, 3 patches: applied"),
    (State.READY, "", "host, 3 patches: NOT IN FORCE: the adapters were not registered"),
    (State.REFUSED, "expected (t) (" + "versions, " * 30 + ")", "NOT IN FORCE: refused: expected"),
    (State.KEPT, "a small call differs", "host, 3 patches: kept: a small call differs"),
    (State.OVERWRITTEN, "rival.fused_rope.rotate", "overwritten by rival.fused_rope.rotate"),
    (State.CAPTURED, ", ".join(MODULES), "captured too early by a.b.module_0, a.b.module_1"),
    (State.DISABLED, "", "host, 3 patches: disabled by NPU_OPS_DISABLE"),
    (State.LEFT, "SGLang's plugins", "left to SGLang's plugins"),
    (doctor.Missing.MODULE, "", "host, 3 patches: not in this version"),
    (doctor.Missing.BROKEN, "RuntimeError: half", "NOT IN FORCE: does not import: RuntimeError:"),
)


def in_state(state, detail, name="x"):
    """Return a row of doctor's patches in this state."""
    target = f"host.{'deep.' * 9}modeling_{name}:{'long' * 14}"
    if isinstance(state, doctor.Missing):
        row = npu_ops_adapters.Status(target, "rope", State.WAITING)
        return doctor._patch(row, None, state, detail)
    return doctor._patch(npu_ops_adapters.Status(target, "rope", state, detail), None)


def shown(rows):
    """Return doctor's text for these patches, joined to one line."""
    return " ".join("\n".join(doctor._patches(rows)).split())


@pytest.mark.parametrize("state, detail, said", MANY)
def test_patches_are_grouped_by_reason(state, detail, said):
    rows = [in_state(state, detail, name) for name in "xyz"]
    text = shown(rows)
    assert text.count(said) == 1, text
    at_rest = state in doctor.AT_REST
    assert list(doctor.not_in_force(found_with(patches=rows))) == (
        [] if at_rest else [f"host, 3 patches (rope): {doctor._reason(rows[0])}"]
    )
    assert text.count(f"rope: {'long' * 14} of x, y, z") == (state not in doctor.ABSENT)


def test_two_reasons_are_two_groups():
    rows = [in_state(State.REFUSED, detail) for detail in ("one", "two")]
    assert "host, 1 patch: NOT IN FORCE: refused: one" in shown(rows)
    assert "host, 1 patch: NOT IN FORCE: refused: two" in shown(rows)


def test_it_is_readable_in_80_columns():
    rows = [in_state(state, detail) for state, detail, _ in MANY]
    bad = [{"what": "word " * 40, "fix": "word " * 40, "source": "verl #4254"}]
    reasons = [
        {"op": "rope", "device": device, "implementation": name, "why_not": why}
        for device in ("cpu", "npu")
        for name, why in (("aclnn", "because " * 30), ("reference", None))
    ]
    found = found_with(patches=rows, implementations=reasons) | {"known bad": bad}
    found["not in force"] = list(doctor.not_in_force(found))
    text = doctor.text(found)
    assert max(map(len, text.splitlines())) <= doctor.WIDTH == 80
    assert text.count("\nNOT IN FORCE: ") == 6 and "KNOWN BAD: word" in text
    assert "2 patches can be undone" in text


def test_nothing_is_said_of_devices_that_are_not_there(monkeypatch):
    text = doctor.text(doctor.collect())
    assert "cuda" not in text and "npu devices" not in text and "on npu" not in text
    monkeypatch.setattr(doctor.hardware, "npu_count", lambda: 2)
    assert doctor.devices() == ["cpu", "npu"]
    text = doctor.text(doctor.collect())
    assert "  npu devices         2" in text and "on cpu          on npu" in text
    assert "not aclnn on npu: attention: npu_fused_infer_attention_score" in text


@pytest.mark.parametrize("amiss, code", [([], 0), (["rope: refused"], 1)])
def test_the_exit_status_says_whether_something_is_amiss(monkeypatch, amiss, code):
    found = found_with(**{"not in force": amiss})
    monkeypatch.setattr(doctor, "collect", lambda modules: found)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert ("nothing amiss" in result.output) == (code == 0)


def test_a_broken_torch_npu_is_said(monkeypatch):
    def fails():
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(torch, "npu", type("npu", (), {"is_available": fails}), raising=False)
    machine = doctor.machine()
    assert machine["npu devices"] is None and machine["SoC"] is None
    assert machine["no npu because"].startswith("torch_npu does not work: OSError: libascendcl.so")


def test_an_install_replaces_no_torch():
    """The torch requirement has no upper bound."""
    text = (where.ROOT / "pyproject.toml").read_text()
    (required,) = re.findall(r'^dependencies = .*"(torch[^"]*)"', text, re.M)
    assert required == "torch>=2.7"


def test_a_native_library_that_does_not_load_is_amiss():
    found = found_with()
    found["build"] |= {"why_not": "undefined symbol: torch_list_size", "broken": True}
    (sentence,) = doctor.not_in_force(found)
    assert sentence == "native kernels: undefined symbol: torch_list_size"
    found["build"] |= {"why_not": "installed without native kernels", "broken": False}
    assert not list(doctor.not_in_force(found))


def test_kernels_of_another_cann_are_amiss(monkeypatch):
    found = found_with()
    found["build"]["cann"] = "/opt/cann-8.5.0"
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann-8.5.2")
    (said,) = doctor.not_in_force(found)
    assert said == (
        "AscendC kernels: built with /opt/cann-8.5.0, but the CANN here is /opt/cann-8.5.2"
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann-8.5.0")
    assert not list(doctor.not_in_force(found))


def test_two_torch_npu_are_said(monkeypatch, tmp_path):
    for folder, name, version in (("a", "torch_npu", "2.8.0"), ("b", "torch-npu", "2.9.0")):
        info = tmp_path / folder / f"torch_npu-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    (said,) = [found["what"] for found in always({}, {})]
    assert re.match(r"torch_npu is installed more than once: 2.9.0 in .*b.*, 2.8.0 in .*a", said)
