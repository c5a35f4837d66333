"""The command line, run as a user does."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import typer
from npu_ops_tools import fuzz, where
from npu_ops_tools.cli import app
from typer.testing import CliRunner

import npu_ops
from npu_ops.core import hardware

MEGATRON = where.ROOT / ".cache" / "megatron" / "0.16.1"


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def command(*arguments, code=0, **changes):
    """Run npu-ops in a subprocess with `changes` to its environment; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", *map(str, arguments)],
        env=os.environ | changes,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_version():
    assert call("--version").strip() == npu_ops.__version__


def test_list_has_every_op_and_function():
    listed = call("list")
    for op, functions in where.ops().items():
        assert f"{op} ({', '.join(where.implementations(op))})" in listed
        assert all(f"  {function}: " in listed for function in functions)


@pytest.mark.parametrize("name", ["mrope", "apply_multimodal_rotary_pos_emb"])
def test_where(name):
    rows = [line.rsplit(maxsplit=1) for line in call("where", name).splitlines()]
    assert ["definition", "npu_ops/ops/mrope/reference.py"] in rows
    assert ["CPU kernel", "csrc/mrope/mrope_cpu.cpp"] in rows
    for framework in ("megatron", "transformers"):
        assert ["adapter", f"python/npu_ops_adapters/{framework}/mrope.py"] in rows
    assert all((where.ROOT / path).exists() for _, path in rows)


def test_explain_attention():
    said = call("explain", "attention", "layout=TND", "keys=packed", "heads=16", "head_dim=72")
    assert said.startswith("our flash attention runs the call") and "pass cu_seqlens_cpu" in said
    plan = json.loads(call("explain", "attention", "is_causal=true", "training=true", "--json"))
    assert plan["operator"] == "npu_fusion_attention" and plan["sparse_mode"] == 3
    wrong = command("explain", "attention", "heads=x", code=2)
    assert wrong.startswith("npu-ops: heads: got 'x', needs int")


@pytest.mark.parametrize("device", ["npu", "cuda", "cuda:1", "cpu:1", "nope", "meta", "", "npu:x"])
@pytest.mark.parametrize("verb", ["verify", "tune", "bench", "parity", "demo", "replay"])
def test_a_device_that_is_not_here_is_one_sentence(verb, device, tmp_path, monkeypatch):
    """Every command with --device reports a missing device before it starts anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "npu_why_not", lambda: "torch_npu is not installed")
    torch.save({"op": "l2norm", "implementation": "cpu", "device": "cpu"}, tmp_path / "file.pt")
    file = ["file.pt"] if verb == "replay" else []
    # commands whose --device is an enum, with its accelerators
    named = {"demo": ["npu"], "verify": ["npu", "cuda"], "tune": ["npu", "cuda"]}
    if device not in named.get(verb, [device]):
        assert "is not one of" in call(verb, "--device", device, code=2)
        return
    (sentence,) = call(verb, *file, "--device", device, code=2).splitlines()
    why = " (torch_npu is not installed)" if device.startswith("npu") else ""
    assert sentence == f"npu-ops: device: got {device}, which is not here{why}, needs one of cpu"


def test_where_of_something_else():
    said = command("where", "nope", code=2)
    assert f"op: got 'nope', needs one of {', '.join(where.ops())}" in said


def of_megatron(found):
    """Return the rows of Megatron-Core's patches, without Megatron-Bridge's."""
    return [row for row in found["patches"] if row["target"].startswith("megatron.core.")]


def test_doctor_says_what_takes_each_op_and_what_is_patched():
    found = json.loads(command("doctor", "--json", PYTHONPATH=str(MEGATRON)))
    taken = {
        (row["op"], row["device"]): row["implementation"]
        for row in found["implementations"]
        if row["why_not"] is None
    }
    native = "cpu" if npu_ops.build_info()["native"] else "reference"
    for op in where.ops():
        assert taken[op, "cpu"] == native
    assert {row["device"] for row in found["implementations"]} == {"cpu"}  # the only device here
    adapters = where.ROOT / "python" / "npu_ops_adapters" / "megatron"
    adapted = [op for op in where.ops() if (adapters / f"{op}.py").exists()]
    patches = of_megatron(found)
    assert {row["state"] for row in patches} == {"applied"}
    others = {"jit_fuser", "gated_delta_net", "gdn_decay", "checkpoint"}
    # This version of Megatron computes gates inline, and its decoding uses none of fla's functions.
    of_later = {"gdn_gate", "causal_conv1d_update", "fused_recurrent_gated_delta_rule"}
    expected = {*adapted, *others} - of_later
    assert {row["op"] for row in patches} == expected
    assert found["packages"]["torch"] == torch.__version__


def test_doctor_without_frameworks():
    shown = command("doctor", COLUMNS="200")
    assert "mindspeed, 13 patches: not installed" in shown and "nothing amiss" in shown
    assert max(map(len, shown.splitlines())) <= 80  # however wide the terminal


def test_doctor_shows_a_framework_that_does_not_import(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('half installed')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    states = {(row["state"], row["detail"]) for row in of_megatron(found)}
    assert states == {("does not import", "RuntimeError: half installed")}
    (sentence,) = found["not in force"]  # one sentence per reason
    assert sentence.startswith(f"megatron.core, {len(of_megatron(found))} patches (")
    assert sentence.endswith("): does not import: RuntimeError: half installed")
    assert done.returncode == 1


@pytest.fixture
def broken_backend(tmp_path):
    """Return variables that make `import torch` fail, as torch_npu does without CANN."""
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nbroken = broken_backend:load\n")
    (tmp_path / "broken_backend.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def test_a_backend_of_torch_that_does_not_load_is_told_by_every_command(broken_backend):
    said = command("where", "rope", code=1, **broken_backend)
    assert said == (
        "npu-ops: `import torch` fails here: libhccl.so: cannot open\n"
        "npu-ops: `npu-ops doctor` says what to do\n"
    )


def test_doctor_goes_on_where_a_backend_of_torch_does_not_load(broken_backend):
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", "doctor", "--json"],
        env=os.environ | broken_backend, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.startswith("npu-ops: `import torch` fails here: libhccl.so: cannot open\n")
    assert json.loads(done.stdout)["packages"]["torch"] and done.returncode == 1


def test_doctor_finds_a_checkout_on_the_path(tmp_path):
    """A checkout on PYTHONPATH has no package metadata, e.g. a clone of Megatron."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0.99.0'")
    (core / "jit.py").write_text("def jit_fuser(function): return function")
    found = json.loads(command("doctor", "--json", PYTHONPATH=str(tmp_path)))
    assert found["packages"]["megatron-core"] == "0.99.0"
    (fuser,) = [row for row in found["patches"] if row["target"] == "megatron.core.jit:jit_fuser"]
    assert fuser["state"] == "applied"
    others = {row["state"] for row in of_megatron(found) if row is not fuser}
    assert others == {"not in this version"}
    bridge = {row["state"] for row in found["patches"] if "megatron.bridge" in row["target"]}
    assert bridge == {"not installed"}


def test_bench_then_report(tmp_path):
    settings = ("--quick", "--longest", 0, "--only", ", forward, ")
    shown = call("bench", "l2norm", "gdn_gate", *settings, "--output", tmp_path)
    assert f"8 rows in {tmp_path}" in shown and " ms (" in shown
    call("report", tmp_path, "--output", tmp_path / "page")
    page = (tmp_path / "page" / "index.html").read_text()
    assert "l2norm" in page and page.count("data-row=") == 8


def test_bench_of_something_else():
    assert "ops: got ['nope'], needs some of" in command("bench", "nope", code=2)


def test_report_of_something_else(tmp_path):
    assert "no such file" in command("report", tmp_path / "no.csv", code=2)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "needs one that npu-ops bench wrote" in command("report", tmp_path / "other.csv", code=2)


def test_demo_trains_and_compares(tmp_path):
    shown = command(
        *("demo", "--output", tmp_path, "--megatron", MEGATRON, "--steps", 10, "--seeds", 2),
        COLUMNS="200",
    )
    for check in ("in one of the two trainings", "loss decreases", "equal without", "alike with"):
        assert f"{check}" in shown
    assert "equal without dropout: Gated Delta Net and attention 3:1" in shown
    assert shown.count("yes ") == 5 and "NO " not in shown
    page = pathlib.Path(tmp_path, "index.html").read_text()
    assert page.count("<svg") >= 4 and "megatron-core 0.16.1" in page


def test_demo_without_megatron(tmp_path):
    error = command("demo", "--megatron", tmp_path, code=2)
    assert "megatron: got" in error and "pip install --no-deps" in error


# The command line as a whole


VERBS = typer.main.get_command(app).commands
# Commands whose results are pages, files or the output of another program.
WITHOUT_A_TABLE = {"demo", "new-op", "report", "verify"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_help_text(verb):
    assert VERBS[verb].help
    missing = [p.name for p in VERBS[verb].params if not getattr(p, "help", None)]
    assert missing == []


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - WITHOUT_A_TABLE))
def test_what_prints_a_table_prints_json_too(verb):
    assert any("--json" in option.opts for option in VERBS[verb].params)


def test_json_of_ops_and_places():
    listed = json.loads(call("list", "--json"))
    assert listed.keys() == where.ops().keys()
    assert listed["rope"]["implementations"] == where.implementations("rope")
    places = json.loads(call("where", "rope", "--json"))
    assert places["definition"] == ["npu_ops/ops/rope/reference.py"]


def test_json_of_parity_and_bench():
    (row, *_) = json.loads(call("parity", "rope", "--tokens", 8, "--json"))
    assert row["op"] == "rope" and row["passed"] is True and row["forward"] <= 1
    settings = ("--quick", "--longest", 0, "--only", " 16 tokens, forward, ")
    rows = json.loads(call("bench", "gdn_gate", *settings, "--json"))
    assert {row["op"] for row in rows} == {"gdn_gate"} and rows[0]["ms_p50"] > 0


def test_json_of_what_the_emulator_has():
    found = json.loads(command("emulate", "--status", "--json"))
    assert found["torch"] == torch.__version__


def test_the_rest_of_the_line_is_the_commands():
    wrong = command("emulate", "--devices", 0, "no-such-program", "--devices", "x", code=1)
    assert wrong == "npu-ops emulate: devices: got 0, needs 1 to 64\n"


def test_fuzz_repeats_a_case_and_says_what_is_wrong_with_another():
    assert call("fuzz", "--repeat", '{"function":"l2norm","settings":{"shape":[3]}}') == "right\n"
    wrong = command("fuzz", "--repeat", '{"function":"nope"}', code=2)
    assert wrong.startswith("npu-ops: repeat: got '{") and "needs a case" in wrong
    wrong = command("fuzz", "nope", "--minutes", "0", code=2)
    assert wrong.startswith("npu-ops: functions: got ['nope'], needs some of ['attention'")


def test_fuzz_needs_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(where, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="run from a clone of the repository"):
        fuzz.load()
