"""Builds csrc/emulator into a library that stands in for the vendor's runtime libraries."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from npu_ops_emulator import wheels
from npu_ops_emulator.errors import EmulatorError

# Libraries that torch_npu links against or opens by name. Each is an empty library that depends on
# the emulator's.
NAMES = (
    "acl_op_compiler", "acl_tdt_channel", "ascend_dump", "ascend_hal", "ascendcl", "ge_runner",
    "graph", "hccl", "hcomm", "msprofiler", "nnopbase", "opapi", "runtime",
)  # fmt: skip
LIBRARY = "npu_ops_emulator"
FLAGS = ("-O1", "-g0", "-std=c++20", "-fPIC", "-Wno-attributes")


def sources() -> list[pathlib.Path]:
    """Return the C++ files, from an installed package or from a checkout."""
    here = pathlib.Path(__file__).resolve().parent
    for folder in (here / "_sources", here.parents[1] / "csrc" / "emulator"):
        if folder.is_dir():
            return sorted(folder.glob("*.cpp"))
    raise EmulatorError(f"the emulator's sources (csrc/emulator) are not installed next to {here}")


def compiler() -> list[str]:
    command = os.environ.get("CXX", "g++").split()
    if shutil.which(command[0]) is None:
        raise EmulatorError(
            f"the C++ compiler {command[0]!r} was not found. It compiles the emulated NPU once, on "
            "this machine. Install g++, or set CXX."
        )
    return command


@functools.cache
def digest() -> str:
    """Return a hash of the sources, the compiler and its flags."""
    state = hashlib.sha256(repr((FLAGS, NAMES, os.environ.get("CXX"))).encode())
    for path in sources():
        state.update(path.read_bytes())
    state.update(_headers())
    return state.hexdigest()[:16]


@functools.cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(sources()[0].parent.glob("*.h")))


def folder() -> pathlib.Path:
    """Return the folder of the libraries built from these sources; it may not exist yet."""
    return wheels.cache() / f"lib-{digest()}"


def is_built() -> bool:
    return folder().is_dir()


@contextlib.contextmanager
def locked():
    """Lock the build: one process builds, the others wait."""
    wheels.cache().mkdir(parents=True, exist_ok=True)
    with open(wheels.cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure(torch_npu: str | None = None) -> pathlib.Path:
    """Install torch_npu and build the libraries if necessary; return the libraries' folder.

    torch_npu: a wheel or a folder of wheels; default: $NPU_OPS_TORCH_NPU, else pip finds one.

    Raises:
        EmulatorError: the wheel or the compiler is missing, or compilation failed.
    """
    if is_built() and wheels.is_installed():
        return folder()
    with locked():
        if not wheels.is_installed():
            wheels.install(torch_npu or os.environ.get("NPU_OPS_TORCH_NPU"))
        if not is_built():
            _build()
    return folder()


def _build() -> None:
    command = compiler()
    print(f"npu-ops: compiling the emulated NPU into {folder()}", file=sys.stderr)
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    include = [
        *wheels.include_dirs(),
        str(sources()[0].parent),
        str(torch / "include"),
        str(torch / "include" / "torch" / "csrc" / "api" / "include"),
    ]
    compile_one = [*command, *FLAGS, *(f"-I{path}" for path in include), "-c"]
    with tempfile.TemporaryDirectory(dir=wheels.cache()) as scratch:
        # Start the largest files first, so that no thread ends with a long one.
        ordered = sorted(sources(), key=lambda path: -path.stat().st_size)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda path: _object(compile_one, path, scratch), ordered))
        out = pathlib.Path(scratch) / "lib"
        out.mkdir()
        # No rpath for torch's libraries: the process has already loaded them.
        _run([*command, "-shared", "-o", f"{out}/lib{LIBRARY}.so", f"-Wl,-soname,lib{LIBRARY}.so",
              *objects, f"-L{torch}/lib", "-ltorch_cpu", "-lc10"])  # fmt: skip
        for name in NAMES:
            _run([*command, "-shared", "-x", "c++", "/dev/null", "-o", f"{out}/lib{name}.so",
                  f"-Wl,-soname,lib{name}.so", f"-L{out}", "-Wl,--no-as-needed", f"-l{LIBRARY}",
                  "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"])  # fmt: skip
        out.rename(folder())
    _forget_old()


def _object(command: list[str], source: pathlib.Path, scratch: str) -> str:
    """Compile one file, or reuse a cached object of the same source and command; return its
    path."""
    key = hashlib.sha256(f"{command}{_headers()}".encode() + source.read_bytes()).hexdigest()[:16]
    kept = wheels.cache() / f"object-{source.stem}-{key}.o"
    if not kept.exists():
        made = f"{scratch}/{source.stem}.o"
        _run([*command, str(source), "-o", made])
        os.rename(made, kept)
    return str(kept)


def _forget_old() -> None:
    """Remove objects and earlier libraries older than a day; newer ones may be in use."""
    yesterday = time.time() - 86400
    for path in wheels.cache().glob("object-*.o"):
        if path.stat().st_mtime < yesterday:
            path.unlink(missing_ok=True)
    for path in wheels.cache().glob("lib-*"):
        if path != folder() and path.stat().st_mtime < yesterday:
            shutil.rmtree(path, ignore_errors=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shown = " ".join(command[-3:])
        raise EmulatorError(f"the emulated NPU does not compile ({shown}):\n{done.stderr[-4000:]}")
