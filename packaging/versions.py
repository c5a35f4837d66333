"""Install npu-ops with every supported torch and Python, and run it there; print one line each.

    python packaging/wheels.py x86_64
    python packaging/versions.py [torch-2.9.0 ...]
    python packaging/versions.py --short torch-2.7.1 torch-2.9.0

An environment has one torch and the packages that the tests need. Of this checkout, only the tests
are on its path. npu-ops is installed from the sources and again from the wheel, and each time the
README's first snippet runs. Then follow `npu-ops doctor`, and every op's cases in bf16, forward and
backward: on the CPU, and on the emulated NPU with the torch_npu of that torch. `npu-ops demo` runs
with two ranks on the emulated NPU.

ascendnpu-ir 1.2 decides whether kernels compile. For the torch of images with CANN 8.5 it is 1.1,
the oldest version that reports what fits on the chip. The results are written to
python/npu_ops_tools/tested.csv, and into the tables of README and docs/images, in both languages.

--short: from the sources, doctor, and `npu-ops verify` on the emulated NPU; nothing is written.

CUDA builds of torch run with stand-ins for CUDA's libraries (standins.py). All files lie in
.cache/versions.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import standins
import wheels
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / ".cache" / "versions"
sys.path.insert(0, str(ROOT / "python"))
from npu_ops_tools import support  # noqa: E402

# torch, its torch_npu, and the Python of the images that have them.
TORCH_NPU = (
    ("2.7.1", "2.7.1.post11", "3.11"),
    ("2.8.0", "2.8.0.post5", "3.11"),
    ("2.9.0", "2.9.0.post9", "3.11"),
    ("2.9.1", "2.9.1", "3.11"),
    ("2.10.0", "2.10.0.post7", "3.11"),
    ("2.11.0", "2.11.0.post3", "3.11"),
    ("2.12.0", "2.12.0.post3", "3.11"),
    ("2.13.0", "2.13.0", "3.11"),
    ("2.14.0", "2.14.0", "3.11"),
)
# Environments without an NPU: the newest torch, and the other Pythons.
ALONE = (("2.15.0", "3.11"), ("2.13.0", "3.10"), ("2.13.0", "3.12"), ("2.13.0", "3.13"))
# The dependencies of torch, npu-ops and the tests. They are installed before torch, because a
# resolver that knows torch would download CUDA's libraries and might choose another torch.
PACKAGES = (
    "numpy<2.4", "packaging", "rich", "typer", "typing_extensions", "sympy", "networkx", "jinja2",
    "fsspec", "filelock", "setuptools>=77,<82", "wheel", "ninja", "pytest<9.2", "pytest-timeout",
    "pytest-xdist", "hypothesis", "pip",
)  # fmt: skip
EMULATOR = (
    "llvmlite==0.50.0", "pybind11", "scipy", "psutil", "decorator", "attrs", "pyyaml", "cmake",
    "einops", "matplotlib", "pillow", "scikit-learn", "transformers==5.23.0",
)  # fmt: skip
COMPILER, OLDER_COMPILER = "1.2.0", "1.1.0"
COMPILERS = ("triton-ascend==3.2.0", f"ascendnpu-ir=={COMPILER}")
CASES = ("tests/ops/test_contract.py", "-W", "ignore", "-p", "no:cacheprovider", "-n2", "-k")


class Failed(Exception):
    """A step failed; the message is the sentence to report."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment: a torch, a Python, and a torch_npu or none."""

    torch: str
    python: str
    torch_npu: str = ""

    @property
    def name(self) -> str:
        return f"torch-{self.torch}" if self.torch_npu else f"{self.torch}-python-{self.python}"

    @property
    def folder(self) -> pathlib.Path:
        return HERE / self.name

    @property
    def compiler(self) -> str:
        """The version of ascendnpu-ir that decides whether a kernel compiles."""
        if not self.torch_npu:
            return ""
        return OLDER_COMPILER if Version(self.torch) < Version("2.10") else COMPILER


def rows() -> list[Row]:
    return [Row(torch, python, npu) for torch, npu, python in TORCH_NPU] + [
        Row(*alone) for alone in ALONE
    ]


def interpreter(version: str) -> str:
    """Return the path of a Python of that version, on PATH or among pyenv's."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python3"))
    python = str(found[-1]) if found else shutil.which(f"python{version}")
    if not python:
        raise Failed(f"no Python {version} here")
    return python


def pip(row: Row, *arguments) -> None:
    command = [sys.executable, "-m", "pip", "--python", row.folder / "bin" / "python", "install"]
    quiet = ["-qq", "--disable-pip-version-check", "--root-user-action=ignore"]
    subprocess.run([*command, *quiet, *arguments], check=True)


def make(row: Row) -> None:
    """Create the environment, unless it exists."""
    done = row.folder / "done"
    if done.exists():
        return
    shutil.rmtree(row.folder, ignore_errors=True)
    subprocess.run([interpreter(row.python), "-m", "venv", "--without-pip", row.folder], check=True)
    pip(row, *PACKAGES, *(EMULATOR if row.torch_npu else ()))
    pip(row, "--no-deps", f"torch=={row.torch}", *(COMPILERS if row.torch_npu else ()))
    (libraries,) = row.folder.glob("lib/python*/site-packages/torch/lib")
    standins.make(libraries, row.folder / "standins")
    if row.torch_npu and any(libraries.glob("libc10_cuda*")):
        standins.one_allocator(row.folder / "standins")
    if row.compiler == OLDER_COMPILER:
        pip(row, "--no-deps", "--target", row.folder / "older", f"ascendnpu-ir=={OLDER_COMPILER}")
        older_compiler(row).chmod(0o755)
    done.touch()


def older_compiler(row: Row) -> pathlib.Path:
    """Return the path of ascendnpu-ir 1.1's compiler. It only checks kernels; 1.2 lowers them."""
    return row.folder / "older" / "ascendnpuir" / "bin" / "bishengir-compile"


def environment(row: Row) -> dict[str, str]:
    """Return the environment variables for a program in the row's environment."""
    libraries = row.folder / "standins"
    judge = {"NPU_OPS_BISHENGIR_COMPILE": str(older_compiler(row))}
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PATH": f"{row.folder / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": " ".join(map(str, libraries.glob("libone_allocator.so"))),
        "OMP_NUM_THREADS": "1",
    } | (judge if row.compiler == OLDER_COMPILER else {})  # fmt: skip


def run(row: Row, *command, cwd=None) -> str:
    """Run a program of the row's environment, and return its output.

    Raises:
        Failed: the program ended with an error.
    """
    program = row.folder / "bin" / command[0]
    if not program.exists():
        raise Failed(f"{command[0]} is not installed")
    done = subprocess.run(
        [program, *command[1:]], cwd=cwd or row.folder,
        env=environment(row), capture_output=True, text=True,
    )  # fmt: skip
    (row.folder / "log").open("a").write(f"$ {command}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        # A test run prints how many tests failed; other programs print no short reason.
        counts = re.findall(r"(\d+ failed, \d+ passed)", done.stdout)
        raise Failed(counts[-1] if counts else f"{command[0]} failed, see {row.folder / 'log'}")
    return done.stdout


def source(row: Row) -> str:
    """Install by the README's first command, from a source distribution; run the snippet."""
    with tempfile.TemporaryDirectory() as folder:
        sources = wheels.tree(pathlib.Path(folder))
        line = ("-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", ".")
        run(row, "python", *line, cwd=sources)
    return snippet(row)


def wheel(row: Row) -> str:
    made = sorted(ROOT.glob("dist/npu_ops-*-manylinux*_x86_64.whl"))
    if not made:
        raise Failed("dist has no wheel; run python packaging/wheels.py x86_64")
    pip(row, "--no-deps", "--force-reinstall", made[-1])
    return snippet(row)


def snippet(row: Row) -> str:
    """Run the README's first snippet, and check that it uses the installed npu-ops and torch."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    where = "import npu_ops, torch; print(npu_ops.__file__, torch.__version__)"
    *said, last = run(row, "python", "-c", f"{code}\n{where}").splitlines()
    path, version = last.split()
    if not path.startswith(str(row.folder)) or not version.startswith(row.torch):
        raise Failed(f"it ran {path} with torch {version}")
    chosen = re.findall(r"implementation='(\w+)', why_not=None", "\n".join(said))
    if chosen != ["cpu"]:
        raise Failed(f"it ran by {chosen}")
    return "yes"


def doctor(row: Row) -> str:
    run(row, "npu-ops", "doctor")  # the exit status is 1 if doctor finds a problem
    return "ok"


def cpu(row: Row) -> str:
    """Run every op's cases on the CPU, and compare with the reference in fp64."""
    chosen = "an_implementation_is_the_reference and cpu-cpu and bfloat16"
    return passed(run(row, "pytest", *CASES, chosen, cwd=ROOT))


def compiles(row: Row) -> str:
    """Compile the representative cases in bf16 with this row's compiler; they take every branch."""
    code = (
        "from npu_ops.core import cases; from npu_ops_tools.where import ops; "
        "print(*{c for op in ops() for c in cases.of(op).REPRESENTATIVE})"
    )
    chosen = [f"--case={case}" for case in run(row, "python", "-c", code).split()]
    said = run(row, "npu-ops", "compile", "--dtype", "bfloat16", "--json", *chosen)
    return str(len(json.loads(said)))


def on_npu(row: Row, kernel: str) -> str:
    chosen = f"an_implementation_is_the_reference and {kernel}-npu and bfloat16 and not large"
    command = ("npu-ops", "emulate", "--", "pytest", "--device", "npu", *CASES, chosen)
    return passed(run(row, *command, cwd=ROOT))


def triton(row: Row) -> str:
    """Run every op's cases by Triton's kernels, with the torch_npu of this torch."""
    return on_npu(row, "triton_ascend")


def ascendc(row: Row) -> str:
    """Run every op's cases by twins of AscendC kernels; needs NPU_OPS_ASCENDC_HEADERS."""
    return on_npu(row, "ascendc")


def demo(row: Row) -> str:
    """Train megatron-core without and with npu-ops, and with npu-ops on two ranks."""
    options = ("--device", "npu-emulated", "--steps", "10", "--seeds", "2")
    run(row, "npu-ops", "demo", *options, "--output", row.folder / "report", cwd=ROOT)
    return "yes"


def verify(row: Row) -> str:
    """Run `npu-ops verify` for two minutes; it checks at least one case of every op."""
    options = ("--device", "npu-emulated", "--minutes", "2", "--output", row.folder / "report")
    run(row, "npu-ops", "verify", *options)
    return "ok"


def passed(output: str) -> str:
    """Return how many tests passed, as text such as "380 passed"."""
    found = re.findall(r"(\d+) passed", output)
    if not found:
        raise Failed("no test ran")
    return f"{found[-1]} passed"


# The steps, by the column of their result.
STEPS = {"source": source, "wheel": wheel, "doctor": doctor, "cpu": cpu}
STEPS_ON_NPU = STEPS | {
    "compile": compiles, "triton": triton, "ascendc": ascendc, "demo": demo,
}  # fmt: skip
SHORT = {"source": source, "doctor": doctor, "verify": verify}


def measure(row: Row, steps: dict) -> dict[str, str]:
    """Return the result of each step by its column; without an environment, no step runs."""
    found = {}
    for column, step in ({"environment": make} | steps).items():
        try:
            found[column] = step(row) or "ok"
        except Failed as error:
            found[column] = str(error) if "failed" in str(error) else f"failed: {error}"
        except subprocess.CalledProcessError as error:
            found[column] = f"{pathlib.Path(error.cmd[0]).name} failed"
        if found["environment"] != "ok":
            break
    return found


def record(row: Row, found: dict[str, str]) -> None:
    """Write the results of a row to the table of doctor, the README and the documentation."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    keys = {key: getattr(row, key) for key in support.KEYS}
    keys[support.COMPILER] = row.compiler
    steps = {step: found.get(step, "") for step in support.STEPS}
    support.write(keys | steps | {"commit": commit.strip()})
    for path, table in (
        ("README.md", support.short_table()),
        ("README.zh-CN.md", support.short_table()),
        ("docs/images.md", support.whole_page()),
        ("docs/images.zh-CN.md", support.whole_page()),
    ):
        put_table(ROOT / path, table)


def put_table(path: pathlib.Path, table: str) -> None:
    """Write a table between the two comments `support` of a page."""
    text = path.read_text()
    head, _, rest = text.partition("<!-- support -->\n")
    _, _, tail = rest.partition("<!-- /support -->")
    path.write_text(f"{head}<!-- support -->\n{table}<!-- /support -->{tail}")


def main(arguments) -> None:
    short = "--short" in arguments
    wanted = [name for name in arguments if name != "--short"]
    known = {row.name: row for row in rows()}
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"versions: got {', '.join(sorted(unknown))}, needs some of {[*known]}")
    HERE.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in wanted or known]
    # Short rows run side by side: each waits for downloads, then runs one process at a time.
    with concurrent.futures.ThreadPoolExecutor(len(chosen) if short else 1) as pool:
        passed = [*pool.map(functools.partial(check, short=short), chosen)]
    raise SystemExit(not all(passed))


def check(row: Row, short: bool) -> bool:
    """Run the steps of a row, print a line, and return whether all passed."""
    begin = time.monotonic()
    steps = STEPS_ON_NPU if row.torch_npu else STEPS
    found = measure(row, SHORT if short else steps)
    if not short and found["environment"] == "ok":
        record(row, found)
    said = ", ".join(f"{column} {what}" for column, what in found.items())
    print(f"{row.name:19} Python {row.python:5} {said} ({time.monotonic() - begin:.0f} s)",
          flush=True)  # fmt: skip
    return not any("failed" in what for what in found.values())


if __name__ == "__main__":
    main(sys.argv[1:])
