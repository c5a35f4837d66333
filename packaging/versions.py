"""Install the wheel beside every torch and Python that it is for, and run it there: one line each.

    python packaging/wheels.py x86_64 pure
    python packaging/versions.py [torch-2.10 ...]

An environment has the wheel, that torch, and what the tests need; nothing of this checkout but its
tests is on its path. In each: the README's first snippet, `npu-ops doctor`, and every op's cases in
bf16, forward and backward; on the emulated NPU too, where `doctor` names a torch_npu. torch's CUDA
builds run beside stand-ins of CUDA's libraries (standins.py). Everything lies in .cache/versions.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import standins

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / ".cache" / "versions"
sys.path.insert(0, str(ROOT / "python"))
from npu_ops_tools.known_bad import TESTED  # noqa: E402

# The release of each torch that is tested.
RELEASES = {"2.7": "2.7.1", "2.10": "2.10.0", "2.13": "2.13.0", "2.14": "2.14.0", "2.15": "2.15.0"}
PYTHONS = ("3.10", "3.12", "3.13")  # besides 3.11, with this torch:
TORCH_OF_PYTHONS = "2.13"
NATIVE_FROM = (2, 10)  # an older torch takes the wheel of Python alone
# torch's and our dependencies, and the tests', installed before torch: a resolver that knows torch
# would fetch CUDA's libraries, and may choose another torch.
PACKAGES = (
    "numpy<2.4", "packaging", "rich", "typer", "typing_extensions", "sympy", "networkx", "jinja2",
    "fsspec", "filelock", "setuptools", "pytest<9.2", "pytest-timeout", "pytest-xdist",
)  # fmt: skip
EMULATOR = (
    "llvmlite==0.50.0", "pybind11", "scipy", "psutil", "decorator", "attrs", "pyyaml", "cmake",
    "ninja", "pip",
)  # fmt: skip
COMPILERS = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0")
CASES = ("tests/ops/test_contract.py", "-W", "ignore", "-p", "no:cacheprovider", "-k")


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment."""

    name: str
    torch: str
    python: str = "3.11"
    torch_npu: str | None = None

    @property
    def native(self) -> bool:
        return tuple(map(int, self.torch.split("."))) >= NATIVE_FROM

    @property
    def folder(self) -> pathlib.Path:
        return HERE / self.name

    @property
    def steps(self) -> dict:
        """What is run, by its column."""
        steps = {"snippet": snippet, "doctor": doctor, "cases": cases}
        return steps | ({"npu": on_npu} if self.torch_npu else {})


def rows() -> list[Row]:
    """What `npu-ops doctor` calls tested, and the other Pythons."""
    of_torch = [Row(f"torch-{torch}", torch, torch_npu=npu) for torch, npu in TESTED]
    return of_torch + [Row(f"python-{python}", TORCH_OF_PYTHONS, python) for python in PYTHONS]


def interpreter(version: str) -> str | None:
    """A Python of that version, on the path or among pyenv's."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python3"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def pip(row: Row, *arguments) -> None:
    command = [sys.executable, "-m", "pip", "--python", row.folder / "bin" / "python", "install"]
    quiet = ["-qq", "--disable-pip-version-check", "--root-user-action=ignore"]
    subprocess.run([*command, *quiet, *arguments], check=True)


def make(row: Row) -> None:
    """The environment, unless it is there; the wheel that is in dist in any case."""
    done = row.folder / "done"
    if not done.exists():
        python = interpreter(row.python)
        if not python:
            raise LookupError(f"no Python {row.python} here")
        shutil.rmtree(row.folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", row.folder], check=True)
        pip(row, *PACKAGES, *(EMULATOR if row.torch_npu else ()))
        compilers = COMPILERS if row.torch_npu else ()
        pip(row, "--no-deps", f"torch=={RELEASES[row.torch]}", *compilers)
        (libraries,) = row.folder.glob("lib/python*/site-packages/torch/lib")
        standins.make(libraries, row.folder / "standins")
        if row.torch_npu and any(libraries.glob("libc10_cuda*")):
            standins.one_allocator(row.folder / "standins")
        done.touch()
    kind = "*-manylinux*_x86_64" if row.native else "*-none-any"
    wheels = sorted(ROOT.glob(f"dist/npu_ops-{kind}.whl"))
    if not wheels:
        raise LookupError("dist has no wheel; run python packaging/wheels.py x86_64 pure")
    pip(row, "--no-deps", "--force-reinstall", wheels[-1])


def run(row: Row, *command, cwd=None) -> str:
    """The output of a program of an environment. Raises CalledProcessError."""
    libraries = row.folder / "standins"
    variables = {"LD_LIBRARY_PATH": str(libraries), "OMP_NUM_THREADS": "1"}
    variables["LD_PRELOAD"] = " ".join(map(str, libraries.glob("libone_allocator.so")))
    done = subprocess.run(
        [row.folder / "bin" / command[0], *command[1:]], cwd=cwd or row.folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables,
        capture_output=True, text=True,
    )  # fmt: skip
    (row.folder / "log").open("a").write(f"$ {command}\n{done.stdout}{done.stderr}\n")
    done.check_returncode()
    return done.stdout


def snippet(row: Row) -> str:
    """The README's first, by the library that was installed."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    where = "import npu_ops, torch; print(npu_ops.__file__, torch.__version__)"
    *said, last = run(row, "python", "-c", f"{code}\n{where}").splitlines()
    path, version = last.split()
    if not path.startswith(str(row.folder)) or not version.startswith(RELEASES[row.torch]):
        raise LookupError(f"it ran {path} with torch {version}")
    chosen = re.findall(r"implementation='(\w+)', why_not=None", "\n".join(said))
    if chosen != ["cpu" if row.native else "reference"]:
        raise LookupError(f"it ran by {chosen}")
    return chosen[0]


def doctor(row: Row) -> str:
    said = run(row, "npu-ops", "doctor")
    if "not this one" in said:
        raise LookupError("doctor does not know that this torch is tested")
    return "ok"


def cases(row: Row) -> str:
    """Every op's, against the reference in fp64; without native kernels PyTorch's, in bf16."""
    kernel = "cpu" if row.native else "reference"
    chosen = f"an_implementation_is_the_reference and {kernel}-cpu and bfloat16"
    return passed(run(row, "pytest", *CASES, chosen, cwd=ROOT))


def on_npu(row: Row) -> str:
    """A case of every op on the emulated NPU, with the torch_npu of this torch."""
    chosen = "an_implementation_is_the_reference and npu and bfloat16 and not large"
    command = ("npu-ops", "emulate", "--", "pytest", "--device", "npu", *CASES, chosen)
    return passed(run(row, *command, cwd=ROOT))


def passed(output: str) -> str:
    """How many tests passed; raises where there were none."""
    found = re.findall(r"(\d+) passed", output)
    if not found:
        raise LookupError("no test ran")
    return f"{found[-1]} passed"


def measure(row: Row) -> dict[str, str]:
    """What came of each step, by its column; after one that failed there is no other."""
    found = {}
    try:
        make(row)
        for column, step in row.steps.items():
            found[column] = step(row)
    except LookupError as error:
        found["failed"] = str(error)
    except subprocess.CalledProcessError as error:
        found["failed"] = f"{pathlib.Path(error.cmd[0]).name}, see {row.folder / 'log'}"
    return found


def main(wanted) -> None:
    known = {row.name: row for row in rows()}
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"versions: got {', '.join(sorted(unknown))}, needs some of {[*known]}")
    HERE.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in wanted or known:
        begin = time.monotonic()
        found = measure(known[name])
        failed |= "failed" in found
        said = ", ".join(f"{column} {what}" for column, what in found.items())
        row = known[name]
        print(f"{name:12} Python {row.python:5} torch {RELEASES[row.torch]:7} {said} "
              f"({time.monotonic() - begin:.0f} s)", flush=True)  # fmt: skip
    raise SystemExit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
