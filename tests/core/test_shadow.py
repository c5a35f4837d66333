"""Shadow mode compares calls with the reference: it changes no result, logs each comparison, and
writes a mismatch to a file that `npu-ops replay` repeats.
"""

import importlib
import logging
import os
import pickle
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from npu_ops_tools.cli import app
from npu_ops_tools.where import ops
from typer.testing import CliRunner

import npu_ops
from npu_ops.core import env, shadow
from npu_ops.core.registry import Table


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run in a folder of the test's own, with all counters reset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shadow, "_calls", shadow.collections.Counter())
    monkeypatch.setattr(shadow, "_written", shadow.itertools.count(1))


def messages(caplog, level=logging.INFO):
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def break_kernel(monkeypatch, table, name, change):
    """Make an implementation replace its last output by `change` of it."""
    (broken,) = [i for i in Table.tables[table].implementations if i.name == name]
    right = broken.launcher

    def wrong(*args):
        right(*args)
        args[-1].copy_(change(args[-1]))

    monkeypatch.setitem(vars(broken), "launcher", wrong)


@pytest.mark.parametrize("op", ops())
def test_it_changes_nothing_and_finds_nothing(op, caplog):
    cases = importlib.import_module(f"npu_ops.ops.{op}.cases")
    for case in (case for case in cases.CASES if case.name in cases.REPRESENTATIVE[:2]):
        function = getattr(npu_ops, getattr(case, "function", ops()[op][0]))
        results = []
        for log in ("once", "shadow:1"):
            inputs = case.inputs(torch.bfloat16)
            torch.manual_seed(0)
            with env.override(log=log):
                out = function(**inputs)
            results.append(list(shadow._tensors((out, *inputs.values()))))
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        said = messages(caplog)
        assert any(s.startswith(f"shadow: {op}: ") and "against reference: " in s for s in said)
        assert not any(s.endswith(": no output") for s in said), said
    assert messages(caplog, logging.ERROR) == []


def test_it_is_switched_on_by_the_environment():
    done = subprocess.run(
        [sys.executable, "-c", "import torch, npu_ops; npu_ops.l2norm(torch.ones(2, 4))"],
        env=os.environ | {"NPU_OPS_LOG": "shadow:1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.startswith("shadow: l2norm: "), done.stderr


def test_gradients_are_compared_too(caplog):
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    with env.override(log="shadow:1"):
        out, _ = npu_ops.apply_rotary_pos_emb(q, q, cos, sin)
        out.sum().backward()
    assert len(messages(caplog)) == 2


def test_in_place_calls(caplog):
    q = torch.randn(1, 2, 5, 16)
    expected, _ = npu_ops.apply_rotary_pos_emb(q, None, *torch.ones(2, 1, 5, 16))
    with env.override(log="shadow:1"):
        npu_ops.apply_rotary_pos_emb(q, None, *torch.ones(2, 1, 5, 16), inplace=True)
    assert torch.equal(q, expected)
    assert "q_out" in messages(caplog)[-1] or "args" in messages(caplog)[-1]


def test_every_nth_call(caplog):
    with env.override(log="shadow:3"):
        for _ in range(7):
            npu_ops.l2norm(torch.ones(2, 4))
            npu_ops.gdn_gate(torch.ones(2, 4), torch.ones(4))
    said = [sentence.split(":")[1].strip() for sentence in messages(caplog)]
    assert sorted(said) == ["gdn_gate"] * 2 + ["l2norm"] * 2


def test_the_reference_is_not_compared_with_itself(caplog):
    with env.override(log="shadow:1", impl={"l2norm": "reference"}):
        npu_ops.l2norm(torch.ones(2, 4))
    assert messages(caplog) == []


def test_a_graph_that_is_captured_is_left_alone(caplog, monkeypatch):
    """Patched torch reports that the CPU is capturing a graph."""
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    with env.override(log="shadow:1"):
        npu_ops.l2norm(torch.ones(2, 4))
    assert messages(caplog) == []


def test_what_is_nan_or_infinite_in_both_is_equal(caplog):
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [3.0, 4.0]])
    with env.override(log="shadow:1"):
        npu_ops.l2norm(x)
    assert messages(caplog, logging.ERROR) == [] and "nan" not in messages(caplog)[0]


@pytest.mark.parametrize("change", [lambda y: y * 1.5, lambda y: y * float("nan")])
def test_a_mismatch_is_dumped_and_its_command_repeats_it(monkeypatch, caplog, tmp_path, change):
    break_kernel(monkeypatch, "l2norm", "cpu", change)
    fused = torch.randn(6, 24)
    with env.override(log="shadow:1"):
        npu_ops.l2norm(fused[:, 4:12])  # a slice, saved with its strides
    (said,) = messages(caplog, logging.ERROR)
    (path,) = tmp_path.glob("npu-ops-mismatch-l2norm-*.pt")
    command = said.partition("repeat: ")[2]
    assert command == f"npu-ops replay {path}" and said.startswith("shadow: WRONG: l2norm: cpu ")
    again = CliRunner().invoke(app, command.split()[1:])
    assert again.exit_code == 1 and again.output.startswith("WRONG: l2norm: cpu on cpu"), again
    elsewhere = subprocess.run(  # a new process has the correct kernel
        [sys.executable, "-m", *command.replace("npu-ops", "npu_ops_tools", 1).split()],
        capture_output=True, text=True,
    )  # fmt: skip
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.startswith("passed: l2norm: cpu on cpu against reference: ")


def test_tuples_with_names_and_shared_memory_come_back(tmp_path):
    from npu_ops.ops.attention.arguments import Extra

    x = torch.arange(24.0).view(4, 6)
    args = (x, x[1:3, ::2], Extra(bias=x.t()), [1, 2], "TND", None, torch.empty(0))
    torch.save(shadow.freeze(args), tmp_path / "frozen")
    frozen = torch.load(tmp_path / "frozen", weights_only=True)
    back = shadow.thaw(frozen)
    assert back[3:6] == ([1, 2], "TND", None) and isinstance(back[2], Extra)
    for actual, expected in ((back[0], x), (back[1], args[1]), (back[2].bias, x.t())):
        assert actual.equal(expected) and actual.stride() == expected.stride()
    back[0][1, 0] = 77
    assert back[1][0, 0] == back[2].bias[0, 1] == 77 and x[1, 0] == 6


RUN = []  # filled by a malicious file


def ran(*args):
    RUN.append(args)
    return lambda *more: ran(*more)


@pytest.fixture
def found():
    """Return the dict that shadow mode saves to a file for a call of l2norm."""
    args = (torch.randn(3, 1, 4), 1e-6, torch.empty(3, 1, 4))
    names = {"op": "l2norm", "implementation": "cpu", "device": "cpu"}
    return names | shadow.freeze(args)


def replayed(found, path):
    torch.save(found, path)
    return CliRunner().invoke(app, ["replay", str(path)])


def test_the_file_that_others_are_made_of_is_replayed(found, tmp_path):
    done = replayed(found, tmp_path / "file.pt")
    assert done.exit_code == 0 and done.output.startswith("passed: l2norm"), done.output


def first_tensor(**changes):
    """Return a function that changes the first tensor of a saved call."""

    def change(found):
        names = ("storage", "dtype", "offset", "shape", "strides")
        layout = found["args"]["tuple"][0]["tensor"]
        for name, value in changes.items():
            layout[names.index(name)] = value

    return change


def first_argument(value):
    def change(found):
        found["args"]["tuple"][0] = value

    return change


def storages(make):
    def change(found):
        found["storages"] = [make(x) for x in found["storages"]]

    return change


HOSTILE = {
    "a foreign class": first_argument({"named": ["os", "system", ["true"]]}),
    "an attribute of ours": first_argument(
        {"named": ["npu_ops.core.registry", "from_module", [f"{__name__}:ran"]]}
    ),
    "nested callables": first_argument(
        {
            "named": [
                "npu_ops.core.registry",
                "contextlib.closing",
                [{"named": ["npu_ops.core.shadow", "importlib.import_module", ["antigravity"]]}],
            ]
        }
    ),
    "a tool": first_argument({"named": ["npu_ops_tools.compile.vendor", "retried", [1, 2]]}),
    "dunders": first_argument({"named": ["__class__", []]}),
    "a class that is kept, by halves": first_argument({"named": ["Rule", []]}),
    "too many fields": first_argument({"named": ["Rule", [None] * 40]}),
    "a name that is not one": first_argument({"named": [["Rule"], []]}),
    "a kind of no value": first_argument({"exec": ["1"]}),
    "two kinds": first_argument({"list": [], "tuple": []}),
    "no kind": first_argument({}),
    "a tensor that is one": first_argument(torch.ones(3)),
    "bytes": first_argument(b"1234"),
    "another argument": first_argument("a word"),
    "one argument more": lambda found: found["args"]["tuple"].append(1),
    "no arguments": lambda found: found["args"]["tuple"].clear(),
    "arguments that are none": lambda found: found.update(args=3),
    "no storages": lambda found: found.update(storages=None),
    "storages left out": lambda found: found.update(storages=[]),
    "floats for bytes": storages(lambda x: x.view(torch.float32)),
    "a word for bytes": storages(lambda x: "word"),
    "bytes that are one": storages(lambda x: x[:1].expand(x.numel())),
    "bytes of no memory": storages(lambda x: x.to("meta")),
    "sparse bytes": storages(lambda x: x.to_sparse()),
    "too little memory": storages(lambda x: x[: x.numel() // 2].clone()),
    "rows beyond the memory": first_tensor(shape=(4, 1, 4)),
    "an offset beyond it": first_tensor(offset=1),
    "an offset before it": first_tensor(offset=-1),
    "strides beyond it": first_tensor(strides=(2**40, 4, 1)),
    "negative strides": first_tensor(strides=(-4, 4, 1)),
    "a stride too few": first_tensor(strides=(4, 1)),
    "sizes of 2**62": first_tensor(shape=(2**62, 1, 2**62)),
    "negative sizes": first_tensor(shape=(-1, 1, -4)),
    "sizes that are fractions": first_tensor(shape=(1.5, 1, 4)),
    "a storage that is not there": first_tensor(storage=7),
    "a storage from the end": first_tensor(storage=-1),
    "a wider dtype": first_tensor(dtype=torch.float64),
    "a quantised dtype": first_tensor(dtype=torch.qint8),
    "a dtype by its name": first_tensor(dtype="float32"),
    "another shape than the output's": first_tensor(shape=(2, 1, 4)),
    "an op that is none": lambda found: found.update(op="nope"),
    "an op that is a list": lambda found: found.update(op=[1]),
    "an implementation that is none": lambda found: found.update(implementation="__init__"),
    "an implementation that is a number": lambda found: found.update(implementation=1),
    "a device that is none": lambda found: found.update(device="nosuch"),
    "a device without memory": lambda found: found.update(device="meta"),
    "a device that is a number": lambda found: found.update(device=0),
    "a device that is not here": lambda found: found.update(device="cuda:3"),
    "a device that torch does not know": lambda found: found.update(device="tpu"),
    "no device": lambda found: found.update(device=""),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_a_sentence(found, tmp_path, change):
    change(found)
    done = replayed(found, tmp_path / "file.pt")
    assert done.exit_code == 2 and RUN == [] and "antigravity" not in sys.modules, done.output
    (sentence,) = done.output.splitlines()
    assert sentence.startswith("npu-ops: ") and len(sentence) > 30, sentence
    assert "weights_only" not in sentence


class Runs:
    """An object that makes pickle run code when it is loaded."""

    def __reduce__(self):
        return ran, ("pickle",)


def test_a_pickle_that_runs_something(found, tmp_path):
    done = replayed(found | {"more": Runs()}, tmp_path / "file.pt")
    assert done.exit_code == 2 and RUN == [] and "cannot be read" in done.output, done.output


@pytest.mark.parametrize("part", [0, 0.3, 0.99])
def test_a_truncated_file(found, tmp_path, part):
    torch.save(found, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(whole[: int(part * len(whole))])
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "file.pt")])
    assert done.exit_code == 2 and "cannot be read" in done.output, done.output


def test_a_folder_is_no_file(tmp_path):
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 2 and done.output.startswith("npu-ops: "), done.output


def test_an_argument_that_a_file_cannot_hold_is_refused_as_it_is_frozen():
    with pytest.raises(TypeError, match="needs a type that a file"):
        shadow.freeze((torch.ones(1), object()))
    with pytest.raises(ValueError, match="two named tuples are called Rule"):
        shadow.keep(type("Rule", (tuple,), {}))


def test_files_are_few(monkeypatch, caplog, tmp_path):
    break_kernel(monkeypatch, "l2norm", "cpu", lambda y: y + 1)
    with env.override(log="shadow:1"):
        for _ in range(12):
            npu_ops.l2norm(torch.randn(2, 4))
    assert len(list(tmp_path.glob("*.pt"))) == shadow.MOST_FILES
    assert messages(caplog, logging.ERROR)[-1].endswith("this process wrote 10 already")


class Mine:
    """A class that torch refuses to load."""


OTHER_FILES = {
    "what torch saved": lambda path: torch.save({"op": "nope"}, path),
    "a class of someone's": lambda path: torch.save(Mine(), path),
    "a model": lambda path: torch.save(torch.nn.Linear(1, 1), path),
    "an old format of torch": lambda path: torch.save(
        Mine(), path, _use_new_zipfile_serialization=False
    ),
    "a script of torch": lambda path: torch.jit.save(torch.jit.script(torch.nn.Identity()), path),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Mine())),
    "a zip": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "text": lambda path: path.write_text("text"),
    "nothing": lambda path: path.touch(),
    "a FIFO": os.mkfifo,
    "no file": lambda path: None,
}


@pytest.mark.parametrize("make", OTHER_FILES.values(), ids=OTHER_FILES.keys())
def test_replay_of_something_else(tmp_path, make):
    """A one-line message names the file and does not pass on torch's advice to load it anyway."""
    path = tmp_path / "other.pt"
    make(path)
    with warnings.catch_warnings(record=True) as warned:
        wrong = CliRunner().invoke(app, ["replay", str(path)])
    assert not warned
    (sentence,) = wrong.output.splitlines()
    assert wrong.exit_code == 2 and sentence.startswith("npu-ops: ") and str(path) in sentence
    assert "weights_only" not in sentence and "trust" not in sentence
    if path.exists():
        assert sentence.endswith("needs a file that NPU_OPS_LOG=shadow:N wrote")
