"""Runs the vendor's tools: triton-ascend's front end and AscendNPU-IR's compiler."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable

INSTALL = "pip install 'npu-ops[compile]'"
# Environment variable: path of a bishengir-compile to use instead of the wheel's, e.g. CANN's.
COMPILER = "NPU_OPS_BISHENGIR_COMPILE"
SOCS = ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9579")
SECONDS = 600  # timeout of a compilation
RETRIES = 3  # retries of a tool that was killed by a signal

# The wheel has no assembler, so the IR after this pass is the last result before instructions.
LAST_PASS = "convert-hivm-to-std"


class CompileError(RuntimeError):
    """The vendor's tools reject a kernel; the message ends with their output."""


@functools.cache
def tool(name: str) -> str:
    """Return the path of a tool.

    The first one found: the compiler that NPU_OPS_BISHENGIR_COMPILE names, a tool of the
    ascendnpu-ir wheel, a tool on PATH.

    Raises:
        FileNotFoundError: the tool was not found.
    """
    named = os.environ.get(COMPILER) if name == "bishengir-compile" else None
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{COMPILER}: got {named!r}, which is not executable")
        return named
    found = shutil.which(name, path=environment()["PATH"])
    if found is None:
        raise FileNotFoundError(f"{name} was not found. Install it: {INSTALL}")
    return found


@functools.cache
def _path() -> str:
    """Return PATH with the wheel's tools first, because one of them starts others."""
    path = os.environ.get("PATH", os.defpath)
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None:
        return path
    folder = pathlib.Path(spec.origin).parent / "bin"
    for file in folder.iterdir():
        if not os.access(file, os.X_OK):  # the wheel drops the executable bit
            _make_executable(file)
    return f"{folder}{os.pathsep}{path}"


def _make_executable(file: pathlib.Path) -> None:
    try:
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    except OSError as error:
        raise PermissionError(
            f"{file} is not executable, and this user may not change it ({error.strerror}); as its "
            f"owner: chmod +x {file.parent}/*"
        ) from error


def environment() -> dict[str, str]:
    """Return the environment for running a tool."""
    return os.environ | {"PATH": _path()}


def retried(call: Callable, *args, **named):
    """Call a function that runs a tool; repeat it if a signal killed the tool.

    triton-adapter-opt 3.2.0 crashes with a segmentation fault in about one of a hundred runs of the
    same kernel. Remove this when a release no longer does.
    """
    for _ in range(RETRIES):
        try:
            return call(*args, **named)
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0:
                raise
    return call(*args, **named)


@functools.cache
def versions() -> str:
    """Return the versions of the front end and of the compiler."""
    found = []
    named = os.environ.get(COMPILER)
    for package in ("triton-ascend", *([] if named else ["ascendnpu-ir"])):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    if named:
        said = subprocess.run([named, "--version"], capture_output=True, text=True).stdout
        found.append(said.partition("\n")[0].strip() or named)
    return ", ".join(found)


def leaves_the_plan_to_hivmc() -> bool:
    """Return whether the compiler leaves the planning of buffers to CANN's hivmc.

    The compiler of ascendnpu-ir 1.0 does. It reports version 0.1.
    """
    return bool(re.search(r"ascendnpu-ir 1\.0|bishengir-compile version 0\.", versions()))


def frontend():
    """Return triton-ascend's compiler backend.

    Raises:
        FileNotFoundError: triton is missing, or is not triton-ascend.
        RuntimeError: triton interprets kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1: this process cannot compile kernels")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0"  # for the source lines of faults
    try:
        from triton.backends import backends
    except ImportError as error:
        raise FileNotFoundError(f"triton-ascend was not found. Install it: {INSTALL}") from error
    if "ascend" not in backends:
        raise FileNotFoundError(f"triton is not triton-ascend. Install that: {INSTALL}")
    return backends["ascend"].compiler


def lower(kernel, signature: dict, constants: dict, soc: str, **options) -> str:
    """Lower a kernel to the dialect that the vendor's compiler takes.

    Raises:
        CompileError: the front end rejects the kernel.
    """
    compiler = frontend()
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    backend = compiler(GPUTarget("npu", soc, 0))
    parsed = backend.parse_options(dict(options))
    stages: dict = {}
    backend.add_stages(stages, parsed)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(), backend.get_module_map()
    metadata = dict(parsed.__dict__)
    try:
        source = ASTSource(kernel, signature, constants=constants)
        module = source.make_ir(parsed, codegen, modules, context)
        text = retried(stages["ttadapter"], stages["ttir"](module, metadata), metadata)
    except CompilationError as error:
        raise CompileError(f"{kernel.fn.__name__}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{kernel.fn.__name__}: {_tail(error.stderr)}") from error
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text)


def flags(options: dict) -> list[str]:
    """Convert launch options to flags of the compiler; most have the same name."""
    names = {
        "multibuffer": "enable-auto-multi-buffer",
        "sync_solver": "enable-hivm-graph-sync-solver",
        "unit_flag": "enable-hivm-unit-flag-sync",
    }
    given = {"multibuffer": True, "enable_auto_bind_sub_block": True} | options
    return [f"--{names.get(k, k.replace('_', '-'))}={str(v).lower()}" for k, v in given.items()]


def compile(name: str, text: str, soc: str, **options) -> tuple[str, tuple[str, ...]]:
    """Compile the result of `lower`; return the last dialect with source locations, and notes.

    options: of the launch, e.g. `multibuffer`.

    Raises:
        CompileError: the kernel does not compile, e.g. for "ub overflow".
        FileNotFoundError: there is no compiler.
    """
    wanted = ("--mlir-print-debuginfo", f"--mlir-print-ir-after={LAST_PASS}")
    output, printed = _compile(name, text, soc, options, wanted)
    return printed, tuple(re.findall(r"\[NOTE\] (.*)", output))


def pipes(name: str, text: str, soc: str, **options) -> str:
    """Compile the result of `lower`, but stop one pass earlier than `compile`.

    Returns HIVM operations, with the pipes' flags and the buffers' addresses.

    Raises:
        CompileError: it does not compile.
        FileNotFoundError: there is no compiler.
    """
    wanted = (f"--mlir-print-ir-before={LAST_PASS}",)
    return _compile(name, text, soc, options, wanted)[1].partition("\n}\n")[0] + "\n}\n"


@functools.cache
def cores(soc: str) -> tuple[int, int]:
    """Return an SoC's numbers of cube and vector cores, according to the compiler.

    Raises:
        CompileError: there is no such SoC.
        FileNotFoundError: there is no compiler.
    """
    said = dict(
        re.findall(r'"(CUBE|VECTOR)_CORE_COUNT", (\d+)', pipes("nothing", "module {}", soc))
    )
    return int(said["CUBE"]), int(said["VECTOR"])


def _compile(name: str, text: str, soc: str, options: dict, wanted: tuple[str, ...]):
    """Return the compiler's output, and the IR that the options `wanted` make it print."""
    if leaves_the_plan_to_hivmc():
        raise CompileError(
            f"{name}: ascendnpu-ir 1.0 leaves buffer planning to CANN's hivmc, without which "
            "npu-ops cannot check a kernel; install ascendnpu-ir 1.1 or newer"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.mlir")
        source.write_text(text)
        command = [
            tool("bishengir-compile"), str(source), f"--target={soc}", "-o", f"{folder}/kernel",
            *flags(options), "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true", *wanted,
        ]  # fmt: skip
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, env=environment(), timeout=SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{name}: the compiler took more than {SECONDS} s") from error
    _, found, printed = result.stderr.rpartition("// -----// IR Dump ")
    output = result.stdout + result.stderr
    if not found:
        raise CompileError(f"{name}: {_tail(output)}")
    return output, printed.partition("\n")[2]


def _tail(output: str | bytes) -> str:
    text = output.decode() if isinstance(output, bytes) else output
    said = re.compile(r"error:|Assertion .* failed")  # assertions print a stack trace, too
    errors = [line for line in text.splitlines() if said.search(line)] or text.splitlines()[-5:]
    return "\n".join(dict.fromkeys(errors))  # the compiler retries, and fails the same way
