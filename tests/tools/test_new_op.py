"""`npu-ops new-op`: the files that it writes are all that a new op needs."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from npu_ops_tools import new_op, where
from npu_ops_tools.cli import app
from npu_ops_tools.compile import SOCS
from typer.testing import CliRunner

ROOT = pathlib.Path(__file__).parents[2]
MOST_LINES = 250
pytestmark = pytest.mark.xdist_group("new op")  # shares one clone


SWEEPS = "toy", "contract", "every_function", "defaults", "rewritten"  # in tests/ops
LIST = "git", "ls-files", "--others", "--exclude-standard"


def lines(folder, *command):
    """Return the lines that a command prints."""
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


class Clone:
    """A copy of this repository with a new op `toy`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        for name in lines(ROOT, *LIST, "--cached"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.copy(ROOT / "npu_ops/_build_info.json", folder / "npu_ops")
        (folder / ".cache").symlink_to(ROOT / ".cache")  # downloads of other tests
        who = "-c", "user.name=test", "-c", "user.email=test@example.org"
        for arguments in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "before")):
            subprocess.run(["git", *arguments], cwd=folder, check=True)
        self.said = self.run(sys.executable, "-m", "npu_ops_tools", "new-op", "toy")
        self.files = lines(folder, *LIST)
        self.build()

    def run(self, *command, **environment) -> str:
        path = os.pathsep.join([str(self.folder), str(self.folder / "python")])
        done = subprocess.run(
            command, cwd=self.folder, env=os.environ | {"PYTHONPATH": path} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def python(self, *arguments, **environment) -> str:
        return self.run(sys.executable, "-m", *arguments, **environment)

    def pytest(self, *arguments, **environment) -> int:
        """Return the number of tests that passed; any failure raises."""
        done = self.python("pytest", "-p", "no:cacheprovider", *arguments, **environment)
        return int(re.search(r"(\d+) passed", done)[1])

    def build(self) -> None:
        """Compile toy's kernels and link them with this checkout's objects.

        `setup.py build_ext` would compile all again, because objects are found by their paths.
        """
        built = ROOT / f"build/native/torch-{torch.__version__}/npu_ops._native"
        objects = sorted(built.glob("csrc/*/*.o"))
        if not objects:
            self.run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
            return
        said = (built / "build.ninja").read_text()
        compiler, flags, last = (
            shlex.split(re.search(rf"^{name} = (.*)$", said, re.M)[1])
            for name in ("cxx", "cflags", "post_cflags")
        )
        made = str(self.folder.with_suffix(".o"))
        self.run(*compiler, "-Icsrc", *flags, "-c", "csrc/toy/toy_cpu.cpp", "-o", made, *last)
        libraries = pathlib.Path(torch.__file__).parent / "lib"
        self.run(
            *compiler, "-shared", "-s", *map(str, objects), made, f"-L{libraries}", "-lc10",
            "-ltorch", "-ltorch_cpu", "-ldl", "-o", "npu_ops/_native.abi3.so",
        )  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return Clone(tmp_path_factory.mktemp("clone"))


@pytest.mark.slow
def test_new_files_only(clone):
    done = clone.run("git", "status", "--porcelain", "--untracked-files=all").splitlines()
    assert {line.split()[0] for line in done} == {"??"}
    assert clone.files == sorted(place.format(op="toy") for place in new_op.FILES.values())
    assert all(file in clone.said for file in clone.files)


@pytest.mark.slow
def test_they_are_few_lines(clone):
    assert (
        sum(len((clone.folder / file).read_text().splitlines()) for file in clone.files)
        <= MOST_LINES
    )


@pytest.mark.slow
def test_the_linters_pass(clone):
    clone.python("ruff", "check", "--no-cache", ".")
    clone.python("ruff", "format", "--no-cache", "--check", ".")
    native = [file for file in clone.files if file.endswith(".cpp")]
    clone.run(str(new_op.BIN / "clang-format"), "--dry-run", "--Werror", *native)
    assert clone.pytest("tests/test_layout.py") > 100


@pytest.mark.slow
def test_what_every_op_promises_holds(clone):
    sweeps = (f"tests/ops/test_{name}.py" for name in SWEEPS)
    assert clone.pytest(*sweeps, "-m", "not slow", "-k", "toy or every_function_has") > 50
    assert clone.pytest("tests/fuzz", "-k", "toy or every_public_function") == 2
    assert clone.pytest("tests/interpreted", "-k", "toy", TRITON_INTERPRET="1") > 3


@pytest.mark.slow
def test_tools_know_it(clone):
    shown = clone.python("npu_ops_tools", "parity", "--model", "qwen3.5-9b", "--tokens", "4")
    assert re.search(r"^toy +hidden +cpu ", shown, re.M)
    assert "npu_ops/ops/toy/op.py" in clone.python("npu_ops_tools", "where", "toy")
    assert re.search(r"^toy +cpu", clone.python("npu_ops_tools", "doctor"), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("soc", SOCS)
def test_rows_of_any_width_compile(clone, soc):
    """Rows narrower than a tile, of exactly one tile, and too long for on-chip memory compile."""
    cases = "--case=odd-t65", "--case=qwen3-8b-t64", "--case=wide-20000"
    command = "npu_ops_tools", "compile", "toy", "--dtype=float32", f"--soc={soc}"
    assert "6 kernels, 0 with faults" in clone.python(*command, *cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tile_is_the_one_that_is_suggested(clone):
    said = clone.python("npu_ops_tools", "compile", "toy", "--suggest-tile", "--json")
    suggested = json.loads(said)
    assert [each["kernel"] for each in suggested] == ["_toy_kernel", "_toy_backward_kernel"]
    assert min(each["tile"] for each in suggested) == max(each["launched"] for each in suggested)
    needs = max(each["bytes_per_element"] for each in suggested)
    kernels = (clone.folder / "npu_ops/ops/toy/triton_ascend.py").read_text()
    assert f"TILE = tile_elements({needs})" in kernels


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rest(clone):
    clone.python("npu_ops_tools", "compile", "toy", *(f"--soc={soc}" for soc in SOCS))
    clone.python("npu_ops_tools", "bench", "toy", "--quick")
    assert clone.pytest("tests/tools/test_parity.py", "tests/tools/test_cli.py") > 20
    emulated = "emulate", "--", sys.executable, "-m", "pytest", "--device", "npu"
    sweeps = [f"tests/ops/test_{name}.py" for name in SWEEPS]
    said = clone.python("npu_ops_tools", *emulated, *sweeps, "-k", "toy", "-m", "not slow")
    assert re.search(r"[1-9]\d* passed", said), said


@pytest.mark.parametrize("name", ["rope", "Toy", "to-y", "class", ""])
def test_a_name_that_cannot_be(name, tmp_path):
    (tmp_path / "csrc/common").mkdir(parents=True)
    with pytest.raises(ValueError, match="^name: got "):
        new_op.write(name, tmp_path)


def test_no_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(where, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["new-op", "toy"])
    assert said.exit_code == 2 and "run from a clone of the repository" in said.output
    assert not list(tmp_path.iterdir())
