"""How the registry uses the table of `npu-ops tune`, and that all ranks must have the same one."""

import json
import os
import pathlib

import pytest
import torch
from torch import distributed

from npu_ops.core import env, hardware, preferences
from npu_ops.core.registry import Implementation, Table


def row(op, implementation, bits, width=8, dtype="float32"):
    return {"op": op, "dtype": dtype, "width": width, "bits": bits,
            "implementation": implementation}  # fmt: skip


@pytest.fixture
def prefer(tmp_path, monkeypatch):
    """Return a function that writes a table for the CPU and returns its path."""
    monkeypatch.setattr(preferences, "cache", lambda: tmp_path)

    def write(*rows):
        path = tmp_path / preferences.file_name(preferences.soc_of("cpu"))
        path.write_text(json.dumps({"format": preferences.FORMAT, "rows": rows}))
        preferences.forget()
        return path

    yield write
    preferences.forget()


@pytest.fixture
def table(monkeypatch):
    """Return a table with two CPU implementations; the second declines widths above 8."""
    monkeypatch.setattr(Table, "tables", dict(Table.tables))

    def too_wide(x):
        return "it is too wide" if x.shape[-1] > 8 else None

    def made(name, why_not=lambda x: None, devices=("cpu",)):
        return Implementation(name, lambda: None, frozenset(devices), why_not)

    return Table("op", [made("first"), made("second", too_wide), made("reference", devices=())])


def x(rows, width=8, dtype=torch.float32):
    return torch.zeros(rows, width, dtype=dtype)


def test_what_was_fastest_runs_near_where_it_was_measured(prefer, table):
    assert table.select(x(4)).name == "first"
    prefer(row("op", "second", 6), row("op", "reference", 12))
    assert x(4).numel().bit_length() == 6
    rows = {1: "second", 4: "second", 32: "second", 64: "reference", 2048: "reference"}
    assert {n: table.select(x(n)).name for n in rows} == rows
    assert table.select(x(2**14)).name == "first"  # no row is near: the default order
    assert table.select(x(4, dtype=torch.float16)).name == "first"


def test_a_preference_takes_what_declines_no_call(prefer, table):
    prefer(row("op", "second", 7, width=16))
    assert table.select(x(4, 16)).name == "first"


def test_a_forced_implementation_and_an_assumed_soc_come_before(prefer, table):
    prefer(row("op", "second", 6))
    with env.override(impl={"op": "reference"}):
        assert table.select(x(4)).name == "reference"
    with hardware.as_if_soc("Ascend910B3"):
        assert table.select(x(4)).name == "first"


def test_explain_says_that_it_was_tuned(prefer, table):
    prefer(row("op", "second", 6))
    verdicts = {v.implementation: v.why_not for v in table.explain(x(4))}
    assert list(verdicts) == ["second", "first", "reference"]
    assert verdicts["second"] is None and verdicts["first"] == "tuned, second comes first"


def rows(**changed):
    fields = row("op", "second", 6) | {"instead_of": "first", "us": 1.5, "instead_us": 2} | changed
    return json.dumps({"format": preferences.FORMAT, "rows": [fields]})


NO_TABLES = {
    "no JSON": "nothing",
    "no object": "[]",
    "no rows": '{"format": 1}',
    "another format": '{"format": 0, "rows": []}',
    "rows that are no list": '{"format": 1, "rows": {"op": "op"}}',
    "a row that is no object": '{"format": 1, "rows": ["op"]}',
    "a row of one field": '{"format": 1, "rows": [{"op": "op"}]}',
    "deep nesting": "[" * 100_000,
    "deep nesting in a row": rows(note=[[[]]]),
    "no text": b"\xff\xfe\x00",
    "Infinity": rows(bits=float("inf")),
    "NaN": rows(us=float("nan")),
    "a float that is infinite": rows(us=15).replace("15,", "1e999,"),
    "10^30 bits": rows(bits=10**30),
    "a number of 5000 digits": '{"format": 1, "rows": [' + "9" * 5000 + "]}",
    "bits below 0": rows(bits=-1),
    "bits that are text": rows(bits="6"),
    "bits that are true": rows(bits=True),
    "a width below 0": rows(width=-8),
    "a width that is no whole number": rows(width=8.5),
    "a function of torch as dtype": rows(dtype="load"),
    "a dtype that torch lacks": rows(dtype="float31"),
    "a dtype that is no name": rows(dtype=None),
    "an op that is not here": rows(op="nope"),
    "an op that is no name": rows(op=["op"]),
    "an unknown implementation": rows(implementation="nope"),
    "an implementation that is no name": rows(implementation={"op": "second"}),
    "a time that is text": rows(us="fast"),
    "no time": rows(instead_us=None),
    "more bytes than are read": rows() + " " * 2**23,
}  # fmt: skip


@pytest.mark.parametrize("text", NO_TABLES.values(), ids=NO_TABLES)
def test_a_file_that_is_no_table_is_an_error(prefer, table, text):
    """A short message names the file and says to remove it."""
    path = prefer()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    preferences.forget()
    with pytest.raises(ValueError, match="json: got .*remove") as error:
        table.select(x(4))
    assert len(str(error.value)) < len(str(path)) + 250
    path.unlink()
    preferences.forget()
    assert table.select(x(4)).name == "first"


def a_directory(path):
    path.mkdir()


def a_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, a_directory, a_device])
def test_what_is_no_regular_file_is_an_error_and_not_waited_for(prefer, table, make):
    path = prefer()
    path.unlink()
    make(path)
    preferences.forget()
    with pytest.raises(ValueError, match="json: got .*remove it"):
        table.select(x(4))


def test_the_file_is_read_once(prefer, table, monkeypatch):
    """The fingerprint and all calls share one read of the file."""
    prefer(row("op", "second", 6))
    read, reads = preferences.read, []
    monkeypatch.setattr(preferences, "read", lambda path: reads.append(path) or read(path))
    preferences.fingerprint("cpu")
    assert table.select(x(4)).name == table.select(x(5)).name == "second"
    assert len(reads) == 1


def test_the_users_table_comes_before_the_packages(tmp_path, monkeypatch):
    folders = tmp_path / "user", tmp_path / "package"
    for folder in folders:
        folder.mkdir()
        (folder / preferences.file_name(preferences.soc_of("cpu"))).touch()
    monkeypatch.setattr(preferences, "cache", lambda: folders[0])
    monkeypatch.setattr(preferences, "PACKAGED", folders[1])
    assert preferences.path_of("cpu").parent == folders[0]
    next(folders[0].iterdir()).unlink()
    assert preferences.path_of("cpu").parent == folders[1]
    assert preferences.path_of("npu") is None


def test_a_user_without_a_home_has_no_table(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert env.cache_folder("preferences") is None


# Ranks


def test_ranks_with_one_table_agree(prefer):
    store = distributed.HashStore()
    for rank in range(3):
        preferences.agree(store, "cpu", rank, preferences.fingerprint("cpu"))


def test_a_rank_with_another_table_is_told_so(prefer):
    store, prints = distributed.HashStore(), []
    for name in ("first", "second"):
        prefer(row("op", name, 6))
        prints.append(preferences.fingerprint("cpu"))
    preferences.agree(store, "cpu", 0, prints[0])
    with pytest.raises(RuntimeError, match="ranks 1 and 0 have different tables for cpu"):
        preferences.agree(store, "cpu", 1, prints[1])
    preferences.agree(store, "npu", 1, prints[1])  # each device type has its own agreement


def test_the_first_call_in_a_group_settles_it(prefer, table, tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        table.select(x(4))
        assert preferences.settled == {"cpu"}
        store = distributed.distributed_c10d._get_default_store()
        assert store.get("npu_ops/preferences/cpu") == b"none 0"
    finally:
        distributed.destroy_process_group()
