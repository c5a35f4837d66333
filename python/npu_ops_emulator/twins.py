"""Compiles AscendC kernels for the CPU (as twins), runs and checks them.

A twin is a kernel's source, compiled with g++ against the vendor's headers and the instructions in
csrc/twin. It computes the kernel's results and reports errors: bounds, alignment, queues, events,
races. It says nothing about time, and bisheng compiles nothing here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent import futures

from npu_ops_emulator import build, headers
from npu_ops_emulator.errors import EmulatorError

LIBRARY = "libnpu_ops_twin.so"
# AscendC's headers are C++17. Frame pointers connect an instruction to the kernel's source line.
# -fno-access-control: a core's state is private in the vendor's types.
FLAGS = ("-std=c++17", "-w", "-O2", "-g1", "-fPIC", "-fno-omit-frame-pointer",
         "-fno-optimize-sibling-calls", "-fno-access-control")  # fmt: skip
ARCHITECTURE = ("-D__NPU_ARCH__=2201", "-D__DAV_C220__", "-D__DAV_C220_VEC__", "-D__DAV_VEC__",
                "-D__CCE_AICORE__=220", "-DASCENDC_CPU_DEBUG=1", "-D__CCE_KT_TEST__=1",
                "-DASCENDC_DUMP=0")  # fmt: skip
_KERNEL = re.compile(r"__global__\s+__aicore__\s+void\s+(\w+)\s*\(")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem found in a launch.

    severity: "error", or "warning" if the vendor's compiler fixes it by itself.
    check: e.g. "race".
    block: index of the core.
    what: the problem, as a sentence.
    access: the instruction with its pipe and its line in the kernel.
    other: the earlier instruction, if two conflict.
    """

    severity: str
    check: str
    block: int
    what: str
    access: str
    other: str = ""

    def __str__(self) -> str:
        after = f", after {self.other}" if self.other else ""
        return (
            f"{self.severity}: {self.check}, block {self.block}: {self.access}{after}: {self.what}"
        )


def parse(text: str) -> list[Finding]:
    """Parse the twin's findings, one per line."""
    found = []
    for line in text.splitlines():
        severity, check, block, what, access, other = line.split("\t")
        found.append(Finding(severity, check, int(block), what, access, other))
    return found


@dataclasses.dataclass(frozen=True)
class Twin:
    """A compiled kernel library."""

    path: pathlib.Path
    kernels: tuple[str, ...]

    def launch(
        self,
        kernel: str,
        blocks: int,
        arguments: bytes,
        tensors: Mapping[str, tuple[int, int]],
        vector_order: bool = False,
        goes_on: bool = False,
    ) -> list[Finding]:
        """Run a kernel, which may access only `tensors`, {name: (address, bytes)}; return the
        findings.

        vector_order: also warn if the vector pipe needs a barrier to read its own results.
        goes_on: continue after one of the vendor's checks failed, to see the consequences.
        """
        twin = _loaded_library()
        run = ctypes.cast(getattr(_loaded(self.path), f"{kernel}__twin"), ctypes.c_void_p)
        names = (ctypes.c_char_p * len(tensors))(*(name.encode() for name in tensors))
        addresses = (ctypes.c_uint64 * len(tensors))(*(a for a, _ in tensors.values()))
        sizes = (ctypes.c_uint64 * len(tensors))(*(b for _, b in tensors.values()))
        twin.npu_ops_twin_regions(names, addresses, sizes, ctypes.c_int64(len(tensors)))
        twin.npu_ops_twin_launch(
            run, ctypes.c_int64(blocks), arguments, int(vector_order), int(goes_on)
        )
        return parse(twin.npu_ops_twin_findings().decode())


def compile(source: pathlib.Path | str, include: Sequence[pathlib.Path] = ()) -> Twin:
    """Compile an AscendC source file for the CPU (its twin), or reuse a cached one.

    Raises:
        EmulatorError: AscendC's headers are missing, or the file does not compile.
    """
    source = pathlib.Path(source)
    library_folder = library().parent
    text = source.read_text()
    kernels = tuple(_KERNEL.findall(text))
    folders = (source.parent, *include)
    digest = _digest(library_folder.name, str(source), *_texts(text, folders))
    target = headers.cache() / "twins" / f"{source.stem}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = pathlib.Path(scratch) / "whole.cpp"
            entries = "".join(f"NPU_OPS_TWIN_ENTRY({kernel})\n" for kernel in kernels)
            whole.write_text(f'#include "{source.resolve()}"\n#include "entry.h"\n{entries}')
            made = pathlib.Path(scratch) / "made.so"
            link = [f"-L{library_folder}", f"-l:{LIBRARY}", f"-Wl,-rpath,{library_folder}"]
            _run([*_command(library_folder, folders), "-include", library_folder / "ascendc.h",
                  whole, "-shared", "-o", made, *link])  # fmt: skip
            os.replace(made, target)
    return Twin(target, kernels)


def _texts(text: str, folders: Sequence[pathlib.Path]) -> list[str]:
    """Return a source's text, and those of headers in `folders` that it includes, recursively."""
    texts, seen = [text], set()
    for including in texts:
        for name in re.findall(r'^#include "(.*)"', including, re.M):
            found = [folder / name for folder in folders if (folder / name).exists()]
            if found and found[0] not in seen:
                seen.add(found[0])
                texts.append(found[0].read_text())
    return texts


@functools.cache
def library() -> pathlib.Path:
    """Return the library that runs all twins' instructions; builds it on first use.

    Raises:
        EmulatorError: AscendC's headers are missing, or the library does not compile.
    """
    state = [path.read_text() for path in _sources("*.cpp", "*.h", "include/**/*.h")]
    folder = headers.cache() / f"twin-{_digest(headers.staged().name, *state)}"
    if not folder.exists():
        _build_library(folder)
    return folder / LIBRARY


def _sources(*patterns: str) -> list[pathlib.Path]:
    sources = headers.twin_sources()
    return [path for pattern in patterns for path in sorted(sources.glob(pattern))]


def _build_library(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=headers.cache()) as scratch:
        out = pathlib.Path(scratch) / "out"
        out.mkdir()
        missing = headers.missing_instructions(headers.staged())
        (out / "missing_instructions.h").write_text(missing)
        (out / "ascendc.h").write_text('#include "kernel_operator.h"\n')
        commands = [[*_command(out), "-x", "c++-header", out / "ascendc.h"]]
        objects = []
        for name, paths in _vendor_checks().items():
            whole = pathlib.Path(scratch) / f"{name}.cpp"
            whole.write_text("".join(f'#include "{path}"\n' for path in paths))
            objects.append(whole.with_suffix(".o"))
            commands.append([*_command(out), *_flags_of_checks(), "-c", whole, "-o", objects[-1]])
        for path in _sources("*.cpp"):
            objects.append(f"{scratch}/{path.stem}.o")
            commands.append([*_command(out), "-c", path, "-o", objects[-1]])
        with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        _run([*build.compiler(), "-shared", "-o", out / LIBRARY, *objects, "-ldl"])
        try:
            out.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise


def _vendor_checks() -> dict[str, list[pathlib.Path]]:
    """Return the sources of the vendor's checks of sizes, alignment, masks and repeats.

    The files of a key are compiled as one translation unit, which takes a tenth of the time. The
    file for sorting has its own key, because it redefines names of the others.
    """
    tools = headers.staged() / "asc-tools" / "cpudebug"
    alone = tools / "src/api_check/kernel_vec_sort_check.cpp"
    together = [path for path in sorted(alone.parent.glob("*.cpp")) if path != alone]
    types = [tools / "src/regfwk/stub_base.cpp", tools / "src/acl_stub/kernel_fp16.cpp"]
    return {"checks": [*together, *types], "sort_checks": [alone]}


def _flags_of_checks() -> list[str]:
    tools = headers.staged() / "asc-tools" / "cpudebug"
    inner = ("src/api_check", "src/api_check/inc", "utils", "utils/include",
             "utils/include/utils")  # fmt: skip
    return ["-DASCENDC_DEBUG=1", *(f"-I{tools / part}" for part in inner)]


def _command(library_folder: pathlib.Path, first: Sequence[pathlib.Path] = ()) -> list[str]:
    sources = headers.twin_sources()
    folders = [*first, library_folder, sources / "include", sources.parent, sources,
               *headers.include_dirs(headers.staged())]  # fmt: skip
    return [*build.compiler(), *FLAGS, *ARCHITECTURE, *(f"-I{folder}" for folder in folders)]


def _run(command: list) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        shown = "\n".join(errors[:20]) or done.stderr[-2000:]
        raise EmulatorError(f"an AscendC kernel or the twin does not compile:\n{shown}")


def _digest(*parts: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    return hashlib.sha256(repr((FLAGS, ARCHITECTURE, compiler, parts)).encode()).hexdigest()[:16]


@functools.cache
def _loaded(path: pathlib.Path) -> ctypes.CDLL:
    _loaded_library()
    return ctypes.CDLL(str(path))


@functools.cache
def _loaded_library() -> ctypes.CDLL:
    twin = ctypes.CDLL(str(library()))
    twin.npu_ops_twin_findings.restype = ctypes.c_char_p
    twin.npu_ops_twin_launch.restype = ctypes.c_int64
    return twin
