"""`npu-ops compile` on a user's kernels: what it reports, and its messages for mistakes."""

import csv
import json
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest
from npu_ops_emulator import vendor
from npu_ops_tools import compile as tool
from npu_ops_tools.cli import app
from npu_ops_tools.compile.files import from_file
from typer.testing import CliRunner

FILE = pathlib.Path(__file__).with_name("kernels.py")
ADD = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
MATMUL = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
RANDOM = {"x": "*fp32", "n": "i32"}


def kernel(name, **constants):
    """Return a launch of a kernel in kernels.py."""
    signature = {"add": ADD, "matmul": MATMUL, "random": RANDOM, "once": RANDOM,
                 "between": {"x": "*fp32", "out": "*fp32"}}[name]  # fmt: skip
    (launch,) = from_file(f"{FILE}::{name}", _pairs(signature), _pairs(constants))
    return launch


def _pairs(values):
    return ",".join(f"{name}={value}" for name, value in values.items())


def line(text):
    """Return the number of the first line of kernels.py that contains `text`."""
    lines = FILE.read_text().splitlines()
    return next(number for number, code in enumerate(lines, 1) if text in code)


def test_a_vector_kernel():
    report = tool.compile_launch(kernel("add", BLOCK=4096))
    assert (report.core, report.faults()) == ("vector", [])
    # Two inputs and an output, each doubled for double buffering; the compiler lets some share
    # memory.
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
    # A kernel without a loop has nothing to overlap; the loop that the compiler adds does not
    # count.
    assert tool.compile_launch(kernel("once", BLOCK=4096), soc).multi_buffer


def test_scalar_loops_are_faults_with_their_line():
    report = tool.compile_launch(kernel("random", BLOCK=1024))
    faults = [fault for fault in report.faults() if "scalar loop" in fault]
    assert faults and all(f"kernels.py:{line('tl.rand')}" in fault for fault in faults)


def test_a_store_that_writes_beyond_its_mask_is_a_fault():
    report = tool.compile_launch(kernel("between", BLOCK=1024))
    assert report.unread_masks == (
        "a load reads beyond its mask", "a store writes back what lies beyond its mask",
    )  # fmt: skip
    assert report.faults() == ["a store writes back what lies beyond its mask"]
    assert tool.compile_launch(kernel("once", BLOCK=1024)).unread_masks == ()


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
    monkeypatch.setattr(vendor, "compile", None)  # must not be called
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


def test_a_pointer_to_what_torch_has_no_tensors_of():
    (launch,) = from_file(f"{FILE}::once", "x=*u32,n=i32", "BLOCK=64")
    assert dict(launch.signature) == {"x": "*u32", "n": "i32"}
    done = command(f"{FILE}::once", "--signature", "x=*u32:8,n=i32", "--constexpr", "BLOCK=64")
    assert done.exit_code == 2 and "signature: got '*u32', needs a pointer to one of" in done.stderr


# Kernels under @triton.autotune and @triton.heuristics

DECORATED = FILE.with_name("decorated.py")
SCALED = "x=*fp32,scale=*fp32,out=*fp32,n=i32:8192"


def constants(name, signature, given=""):
    """Return the constants of each launch of a kernel in decorated.py, and the launches."""
    launches = from_file(f"{DECORATED}::{name}", signature, given)
    return [dict(launch.constants) for launch in launches], launches


def test_each_configuration_of_an_autotuner_is_compiled():
    """Heuristics compute more constants from the configuration's, from tensors and numbers."""
    found, launches = constants("scaled", SCALED)
    assert found == [{"BLOCK": size, "SCALED": True, "WHOLE": True} for size in (512, 4096)]
    assert [launch.case for launch in launches][0] == "BLOCK=512, SCALED=True, WHOLE=True"
    assert [dict(launch.options)["multibuffer"] for launch in launches] == [True, False]
    done = command(f"{DECORATED}::scaled", "--signature", SCALED, "--json")
    rows = json.loads(done.stdout)
    assert [row["stored"] for row in rows] == [512 * 4, 4096 * 4] and done.exit_code == 0
    assert [row["loaded"] for row in rows] == [2 * 512 * 4, 2 * 4096 * 4]


def test_an_argument_that_is_none():
    found, _ = constants("scaled", "x=*fp32,out=*fp32,n=i32:100", "scale=None")
    assert {c["SCALED"] for c in found} == {False} and found[0]["scale"] is None


def test_what_is_given_comes_before_decorators():
    found, (launch,) = constants("scaled", SCALED, "BLOCK=1024,WHOLE=False")
    assert found == [{"BLOCK": 1024, "WHOLE": False, "SCALED": True}] and launch.options == ()
    found, (launch,) = constants("scaled", SCALED, "BLOCK=4096")
    assert found[0]["BLOCK"] == 4096 and launch.options == (("multibuffer", False),)


def test_heuristics_under_an_autotuner_and_defaults():
    found, _ = constants("halves", "x=*fp32,n=i32,step=i32")
    assert found == [{"BLOCK": size, "HALF": size // 2, "ONE": 1} for size in (512, 4096)]


@pytest.mark.parametrize(
    ("name", "signature", "error"),
    [
        ("scaled", SCALED.partition(":")[0], "got no WHOLE, and its heuristic raised KeyError"),
        ("shaped", "x=*fp32", "got no SIZE, and its heuristic raised AttributeError"),
        ("scaled", f"{SCALED}x", "signature: got n=i32:8192x, needs a number"),
        ("halves", "x=*fp32:y,n=i32,step=i32", "got x=*fp32:y, needs a number of elements"),
    ],
)
def test_what_a_heuristic_cannot_know_is_asked_for(name, signature, error):
    done = command(f"{DECORATED}::{name}", "--signature", signature)
    assert done.exit_code == 2 and error in done.stderr
    if "heuristic" in error:
        assert "=VALUE, or values of its arguments in the signature" in done.stderr


PACKAGE = {
    "__init__.py": "raise RuntimeError('needs a device')",
    "ops/__init__.py": "raise RuntimeError('needs a device')",
    "ops/sizes.py": "SIZE = 512",
    "ops/kernel.py": """
        import torch
        import torch_npu
        from framework.ops.sizes import SIZE
        from vllm.forward_context import Context, registered
        from vllm.triton_utils import tl, triton

        from . import sizes

        CORES = triton.runtime.driver.active.utils.get_device_properties(0)["num_vectorcore"]
        device = torch.npu.current_device()


        @triton.autotune([triton.Config({"BLOCK": sizes.SIZE})], key=[])
        @triton.jit
        def kernel(x, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + at, tl.load(x + at))


        @registered("kernel")
        def call(x: torch.Tensor, context: Context | None = None):
            kernel[(1,)](x)


        class Layer(Context):
            pass
    """,
}


@pytest.mark.parametrize("first", [PACKAGE["__init__.py"], "VERSION = 1"])
def test_a_kernel_inside_a_framework(tmp_path, first):
    """A package's `__init__.py` runs only if the kernel needs it; torch_npu, vllm are stand-ins."""
    for name, text in (PACKAGE | {"__init__.py": first}).items():
        (tmp_path / "framework" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "framework" / name).write_text(textwrap.dedent(text))
    if first == "VERSION = 1":  # importable, and sizes.py imports it
        ops = tmp_path / "framework/ops"
        (ops / "__init__.py").write_text("")
        (ops / "sizes.py").write_text("from framework import VERSION\nSIZE = 512")
    kernel = tmp_path / "framework/ops/kernel.py"
    code = f"""
        import sys, torch
        from npu_ops_tools.compile.files import from_file
        from triton.runtime import driver
        before = list(sys.meta_path), driver.active
        (launch,) = from_file({str(kernel) + "::kernel"!r}, "x=*fp32", "")
        print(dict(launch.constants), [name for name in sys.modules if name.startswith("vllm")])
        assert (sys.meta_path, driver.active) == before and not hasattr(torch, "npu")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "{'BLOCK': 512} []\n", done.stderr


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
    with pytest.raises(subprocess.CalledProcessError):  # a failing import still raises
        vendor.retried(run, "module")
    assert next(statuses, None) is None


@pytest.mark.parametrize(
    "said", ["ascendnpu-ir 1.0.0", "bishengir-compile version 0.1.0 (e4e2ba9841d1 2026-01-16)"]
)
def test_a_compiler_that_judges_nothing_is_refused(monkeypatch, said):
    """ascendnpu-ir 1.0 leaves the buffer plan to CANN's hivmc, so it checks nothing here."""
    monkeypatch.setattr(vendor, "versions", lambda: f"triton-ascend 3.2.0, {said}")
    with pytest.raises(vendor.CompileError, match="install ascendnpu-ir 1.1 or newer"):
        vendor.compile("empty", "module {}", "Ascend910B3")


def test_a_tool_in_a_folder_that_may_not_be_written(monkeypatch, tmp_path):
    def refused(self, mode):
        raise PermissionError(1, "Operation not permitted")

    (tool := tmp_path / "bishengir-compile").touch()
    monkeypatch.setattr(pathlib.Path, "chmod", refused)
    with pytest.raises(PermissionError, match=r"\(Operation not permitted\); .*: chmod \+x "):
        vendor._make_executable(tool)
