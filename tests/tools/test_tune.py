"""`npu-ops tune`: what it times and chooses, and that dispatch then uses the choice."""

import json
import os
import textwrap

import pytest
import torch
from npu_ops_tools import doctor, tune
from test_cli import call, command

from npu_ops.core import preferences

# A module that adds 20 ms to each call of l2norm's CPU kernel.
SLOW = """
import dataclasses, time
from npu_ops.core.registry import Table
import npu_ops


def slow(launcher):
    def run(*args):
        time.sleep(0.02)
        launcher(*args)
    return run


table = Table.tables["l2norm"]
table.implementations = tuple(
    dataclasses.replace(i, load=lambda i=i: slow(i.launcher)) if i.name == "cpu" else i
    for i in table.implementations
)
"""


def test_it_chooses_what_is_fastest(tmp_path):
    """Times a slowed kernel on this machine, in another process."""
    (tmp_path / "slowed.py").write_text(textwrap.dedent(SLOW))
    here = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    settings = ("--device", "cpu", "--only", "l2norm", "--model", "qwen3.5-9b", "--tokens", 64)
    said = command("tune", *settings, "--import", "slowed", **here)
    assert "l2norm, bfloat16, rows of 128, 2^18 elements: reference instead of cpu" in said
    (path,) = (tmp_path / "npu_ops" / "preferences").iterdir()
    rows = {row["op"]: row for row in preferences.read(path)["rows"]}
    assert rows["l2norm"]["us"] < 20e3 < rows["l2norm"]["instead_us"]
    orders = preferences.orders(rows.values())
    assert orders["l2norm"][torch.bfloat16, 128][18] == "reference"


def result(implementation, case, us, verdict="right", backward=None, bits=9):
    times = {"forward": {"p50": us}} | ({"backward": {"p50": backward}} if backward else {})
    of_class = {"dtype": "bfloat16", "width": 128, "bits": bits}
    tables = ["op", "op_backward"] if backward else ["op"]
    about = {"op": "op", "implementation": implementation, "case": case, "model": "m", "tokens": 1}
    found = {"classes": dict.fromkeys(tables, of_class), "times": times, "verdict": verdict}
    return about | (found if verdict == "right" else {"verdict": verdict})


def chosen(*results):
    return {row["op"]: row["implementation"] for row in tune.rows(list(results))}


def test_the_fastest_of_a_class_is_chosen():
    results = [
        result("a", "x", 10, backward=5), result("b", "x", 8, backward=6),
        result("a", "y", 10, backward=5), result("b", "y", 9, backward=6),
    ]  # fmt: skip
    assert chosen(*results) == {"op": "b", "op_backward": "a"}


def test_what_is_hardly_faster_is_not_worth_it():
    assert chosen(result("a", "x", 10), result("b", "x", 9.7)) == {"op": "a"}


def test_what_is_wrong_anywhere_is_not_chosen():
    wrong = result("b", "y", 1, "wrong")
    assert chosen(result("a", "x", 10), result("b", "x", 1), wrong) == {"op": "a"}


def test_what_declines_a_call_leaves_it_to_the_first():
    fast = [result("a", "x", 10), result("b", "x", 1), result("a", "y", 100)]
    (row,) = tune.rows([*fast, result("b", "y", 1, "declined")])
    assert (row["implementation"], row["us"], row["instead_us"]) == ("b", 101, 110)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write a table for this CPU to the user's cache, and return its path."""
    monkeypatch.setattr(preferences, "cache", lambda: tmp_path)
    rows = tune.rows([result("a", "x", 10), result("b", "x", 5)])
    made = tune.table(preferences.soc_of("cpu"), rows, {"packages": {}, "npu_ops": "1"})
    return tune.write(made, tmp_path)


def test_show_export_and_remove(table, tmp_path):
    assert "b instead of a, 2.00 times as fast" in call("tune", "--device", "cpu", "--show")
    shown = json.loads(call("tune", "--device", "cpu", "--show", "--json"))
    assert [row["implementation"] for row in shown["rows"]] == ["b"]
    call("tune", "--device", "cpu", "--export", tmp_path / "out")
    assert json.loads((tmp_path / "out" / table.name).read_text())["rows"][0]["bits"] == 9
    call("tune", "--device", "cpu", "--remove")
    assert not table.exists()
    call("tune", "--device", "cpu", "--show", code=2)


def test_doctor_shows_it(table):
    (found,) = doctor.tuned()
    assert (found["device"], found["classes"], found["changed"]) == ("cpu", 1, 1)
    assert found["fingerprint"] in "\n".join(doctor._tuned([found]))
    assert all(len(line) <= doctor.WIDTH for line in doctor._tuned([found | {"path": "x/y"}]))


def test_a_table_without_times_is_shown(table):
    row = {"op": "op", "dtype": "float32", "width": 8, "bits": 5, "implementation": "b"}
    table.write_text(json.dumps({"format": preferences.FORMAT, "rows": [row]}))
    said = call("tune", "--device", "cpu", "--show")
    assert "1 classes, 0 of them with another implementation than before" in said


def test_a_file_that_is_no_table_is_one_sentence(tmp_path):
    """Each command that reads the table names its file and says to remove it."""
    path = tmp_path / "npu_ops/preferences" / preferences.file_name(preferences.soc_of("cpu"))
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    for arguments in (["doctor"], ["tune", "--device", "cpu", "--show"], ["parity", "rope"]):
        said = command(*arguments, code=2, XDG_CACHE_HOME=str(tmp_path))
        assert said.startswith(f"npu-ops: {path}: got") and said.endswith("; remove it\n"), said
    call_with = {"XDG_CACHE_HOME": str(tmp_path)}
    assert command("tune", "--device", "cpu", "--remove", **call_with) == f"removed: {path}\n"
    assert not path.exists()


@pytest.mark.parametrize("arguments", [["--device", "cpu", "--only", "x"],
                                       ["--device", "cpu", "--model", "x"],
                                       ["--device", "npu"]])  # fmt: skip
def test_what_is_not_there_is_refused(arguments):
    call("tune", *arguments, code=2)
