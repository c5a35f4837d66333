"""`npu-ops compile` of a user's own kernels: what it finds, and what it says of mistakes."""

import csv
import json
import pathlib
import shutil
import subprocess

import pytest
from npu_ops_emulator import vendor
from npu_ops_tools import compile as tool
from npu_ops_tools.cli import app
from npu_ops_tools.compile.launches import from_file
from typer.testing import CliRunner

FILE = pathlib.Path(__file__).with_name("kernels.py")
ADD = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
MATMUL = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
RANDOM = {"x": "*fp32", "n": "i32"}


def kernel(name, **constants):
    """A launch of a kernel in kernels.py."""
    signature = {"add": ADD, "matmul": MATMUL, "random": RANDOM, "once": RANDOM}[name]
    return from_file(f"{FILE}::{name}", _pairs(signature), _pairs(constants))


def _pairs(values):
    return ",".join(f"{name}={value}" for name, value in values.items())


def line(text):
    """The number of the line of kernels.py that has `text`."""
    lines = FILE.read_text().splitlines()
    return next(number for number, code in enumerate(lines, 1) if text in code)


def test_a_vector_kernel():
    report = tool.compile_launch(kernel("add", BLOCK=4096))
    assert (report.core, report.faults()) == ("vector", [])
    # Two inputs and an output, each twice for double buffering; the compiler shares some.
    assert 3 * 4096 * 4 <= report.ub_bytes <= 196608
    assert report.l1_bytes == report.l0c_bytes == 0
    (body,) = [body for body in report.bodies if body.depth]
    assert body.source == f"kernels.py:{line('for start in')}"
    assert (body.loads, body.loaded, body.stores, body.stored) == (2, 2 * 4096 * 4, 1, 4096 * 4)
    assert body.vector > 0 and body.cube == 0


def test_a_mixed_kernel():
    report = tool.compile_launch(kernel("matmul", BM=64, BN=64, BK=64))
    assert (report.core, report.faults()) == ("mixed", [])
    assert report.l1_bytes == 2 * 2 * 64 * 64 * 2  # two operands, double-buffered
    assert report.l0c_bytes == 64 * 64 * 4
    (body,) = [body for body in report.bodies if body.depth]
    assert (body.cube, body.loads, body.loaded) == (1, 2, 2 * 64 * 64 * 2)
    assert report.total("cube") == 1 and report.total("stored") >= 64 * 64 * 4


@pytest.mark.parametrize("soc", tool.SOCS)
def test_every_soc(soc):
    report = tool.compile_launch(kernel("add", BLOCK=4096), soc)
    assert (report.soc, report.faults()) == (soc, [])
    # Nothing to overlap where a kernel has no loop of its own; what the compiler adds is none.
    assert tool.compile_launch(kernel("once", BLOCK=4096), soc).multi_buffer


def test_scalar_loops_are_faults_with_their_line():
    report = tool.compile_launch(kernel("random", BLOCK=1024))
    faults = [fault for fault in report.faults() if "scalar loop" in fault]
    assert faults and all(f"kernels.py:{line('tl.rand')}" in fault for fault in faults)


def test_an_overflow_is_an_error_with_its_line():
    with pytest.raises(tool.CompileError, match=r"kernels.py.:\d+.*\n?.*ub overflow"):
        tool.compile_launch(kernel("add", BLOCK=65536))


def test_the_library_form():
    launch = kernel("add", BLOCK=2048)
    report = tool.compile_kernel(launch.kernel, ADD, {"BLOCK": 2048})
    assert isinstance(report, tool.CompileReport) and report.kernel == "add"


def test_a_kept_report_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launch = kernel("add", BLOCK=1024)
    first = tool.compile_launch(launch)
    monkeypatch.setattr(vendor, "compile", None)  # it would fail
    again = tool.compile_launch(launch)
    assert first.seconds > 0 and again.seconds == 0
    assert first.bodies == again.bodies and first.ub_bytes == again.ub_bytes


def command(*arguments):
    return CliRunner().invoke(app, ["compile", *map(str, arguments)])


def test_the_command(tmp_path):
    arguments = (
        f"{FILE}::add", "--signature", "x=*fp32,y=*fp32", "--signature", "out=*fp32,n=i32",
        "--constexpr", "BLOCK=4096",
    )  # fmt: skip
    done = command(*arguments, "--bodies")
    assert done.exit_code == 0, done.stderr
    assert "1 kernels, 0 with faults (triton-ascend 3.2.0, ascendnpu-ir 1.2.0)" in done.stdout
    assert "loop 1 kernels.py:" in done.stdout
    (row,) = json.loads(command(*arguments, "--json", "--csv", tmp_path / "r.csv").stdout)
    (line,) = csv.DictReader((tmp_path / "r.csv").open())
    assert row["kernel"] == line["kernel"] == "add"
    assert row["loaded"] == int(line["loaded"]) == 2 * 4096 * 4


def test_the_command_fails_for_a_fault():
    done = command(f"{FILE}::random", "--signature", "x=*fp32,n=i32", "--constexpr", "BLOCK=1024")
    assert done.exit_code == 1
    assert "FAULT random" in done.stdout and "scalar loop(s) at random.py" in done.stdout


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["nope"], "target: got 'nope', needs one of attention, "),
        (["nope.py::add"], "file: got 'nope.py', needs a Python file"),
        ([f"{FILE}::nope"], "needs FILE.py::NAME of a @triton.jit function"),
        ([f"{FILE}::add"], "arguments: got none, needs x, y, out, n, BLOCK: constexpr"),
        ([f"{FILE}::add", "--signature", "x"], "signature: got 'x', needs name=value"),
        ([f"{FILE}::add", "--signature", "x=*bf17"], "signature: got x=*bf17, needs a type of"),
        (["rope", "--case", "nope"], "case: got 'nope', needs one of few-pairs-interleaved, "),
        (["rope", "--soc", "nope"], "soc: got 'nope', needs one of Ascend910B, "),
        (["rope", "--dtype", "nope"], "'nope' is not one of 'float32', "),
        (["rope", "--csv", "nope/r.csv"], "--csv: got 'nope/r.csv', needs a folder that exists"),
    ],
)
def test_mistakes(arguments, error):
    done = command(*arguments)
    assert done.exit_code == 2 and error in done.stderr


def test_a_file_that_does_not_import(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import nothing_there")
    done = command(f"{file}::add")
    assert done.exit_code == 2 and "mine.py raised ModuleNotFoundError: No module" in done.stderr


def test_a_missing_compiler_is_a_sentence(monkeypatch):
    vendor.tool.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(
        FileNotFoundError, match=r"bishengir-compile was not found. Install it: pip"
    ):
        vendor.tool("bishengir-compile")
    vendor.tool.cache_clear()


def test_a_tool_that_is_killed_runs_again():
    statuses = iter([-11, -11, 0, 1])

    def run(text):
        status = next(statuses)
        if status:
            raise subprocess.CalledProcessError(status, "triton-adapter-opt")
        return text

    assert vendor.retried(run, "module") == "module"
    with pytest.raises(subprocess.CalledProcessError):  # an error is an error
        vendor.retried(run, "module")
    assert next(statuses, None) is None
