"""Compile Triton kernels with the vendor's own compiler, on a machine without an NPU, and say what
became of them: on-chip memory, multi-buffering, work that fell back to scalars.

    npu-ops compile                             every kernel of every op, for the models' shapes
    npu-ops compile rope --soc Ascend910_9391   one op, another SoC
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

INSTALL = "pip install 'npu-ops[compile]'"
SOCS = ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9579")


class CompileError(RuntimeError):
    """A kernel that the vendor's tools refuse; the message ends with what they said."""


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the compiler made of a kernel.

    core: "vector", "cube" or "mixed". ub_bytes: the end of the highest unified buffer.
    scalar_loops: element-wise work that became a loop over single elements, far slower.
    loads, stores: data moves from and to global memory. vector_ops: vector instructions. All are
    counts of places in the code. multi_buffer: whether loads and stores overlap with computation.
    notes: what the compiler gave up to make it fit. seconds: 0 where the result was kept.
    """

    kernel: str
    soc: str
    core: str
    ub_bytes: int
    scalar_loops: int
    loops: int
    loads: int
    stores: int
    vector_ops: int
    multi_buffer: bool
    notes: tuple[str, ...]
    seconds: float

    def faults(self) -> list[str]:
        """What must not be, one phrase each."""
        found = []
        if self.scalar_loops:
            found.append(f"{self.scalar_loops} scalar loops")
        if not self.multi_buffer:
            found.append("multi-buffering lost")
        return found + [f"compiler gave up: {note}" for note in self.notes]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel and what specialises it, as a launch would have compiled it."""

    case: str
    kernel: object
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


# The vendor's tools ------------------------------------------------------------------------------


@functools.cache
def vendor_tool(name: str) -> str:
    """The path of a tool of the ascendnpu-ir wheel, or of one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which(name, path=_tools_path())
    if found is None:
        raise FileNotFoundError(f"{name} was not found. Install it: {INSTALL}")
    return found


@functools.cache
def _tools_path() -> str:
    """PATH with the wheel's tools first: one of them starts others."""
    path = os.environ.get("PATH", os.defpath)
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None:
        return path
    folder = pathlib.Path(spec.origin).parent / "bin"
    for tool in folder.iterdir():
        if not os.access(tool, os.X_OK):  # the wheel drops the bit
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{path}"


@functools.cache
def versions() -> str:
    """The versions of the front end and of the compiler."""
    found = []
    for package in ("triton-ascend", "ascendnpu-ir"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def _frontend():
    """triton-ascend's compiler backend.

    Raises:
        FileNotFoundError: triton is not there, or is another than triton-ascend.
        RuntimeError: triton is interpreting kernels in this process.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1: kernels of this process cannot be compiled")
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    try:
        from triton.backends import backends
    except ImportError as error:
        raise FileNotFoundError(f"triton-ascend was not found. Install it: {INSTALL}") from error
    if "ascend" not in backends:
        raise FileNotFoundError(f"triton is not triton-ascend. Install that: {INSTALL}")
    return backends["ascend"].compiler


def lower(launch: Launch, soc: str, **options) -> str:
    """A kernel in the dialect that the vendor's compiler takes.

    Raises:
        CompileError: the front end refuses it.
    """
    compiler = _frontend()
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = compiler(GPUTarget("npu", soc, 0))
    parsed = backend.parse_options(dict(options))
    source = ASTSource(launch.kernel, dict(launch.signature), constants=dict(launch.constants))
    stages: dict = {}
    backend.add_stages(stages, parsed)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(), backend.get_module_map()
    module = source.make_ir(parsed, codegen, modules, context)
    metadata = dict(parsed.__dict__)
    try:
        text = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{launch.name}: {_tail(error.stderr)}") from error
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text)


def compile_launch(launch: Launch, soc: str = SOCS[0], **options) -> CompileReport:
    """Compile a kernel for `soc` and report on it; a result is kept on disk.

    Raises:
        CompileError: it does not compile, e.g. for "ub overflow".
    """
    text = lower(launch, soc, **options)
    key = hashlib.sha256("\0".join((text, soc, versions(), inspect.getsource(_report))).encode())
    cached = _cache_folder() / f"{key.hexdigest()}.json"
    if cached.exists():
        return CompileReport(**_read(cached))
    start = time.perf_counter()
    hivm, notes = _vendor_compile(launch.name, text, soc)
    report = _report(launch.name, soc, hivm, notes, time.perf_counter() - start)
    _write(cached, dataclasses.asdict(report) | {"seconds": 0.0})
    return report


def compile_kernel(kernel, signature: dict, constants: dict, *, soc=SOCS[0], **options):
    """`compile_launch` of any @triton.jit kernel.

    signature: argument name -> "*bf16", "i32", "fp32", ... constants: constexpr name -> value.
    """
    launch = Launch("", kernel, tuple(signature.items()), tuple(constants.items()))
    return compile_launch(launch, soc, **options)


def _vendor_compile(name: str, text: str, soc: str) -> tuple[str, tuple[str, ...]]:
    """The kernel's code in the vendor's last dialect, and the compiler's notes."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.mlir")
        source.write_text(text)
        result = subprocess.run(
            [
                vendor_tool("bishengir-compile"), source, f"--target={soc}",
                "--enable-auto-multi-buffer=true", "--enable-auto-bind-sub-block=true",
                "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true", f"--save-temps={folder}/stages",
                "-o", f"{folder}/kernel",
            ],
            capture_output=True, text=True, env=os.environ | {"PATH": _tools_path()},
        )  # fmt: skip
        log = result.stdout + result.stderr
        # The wheel has no assembler: success is the file written before it would be called.
        hivm = pathlib.Path(folder, "stages", "module.hivm.opt.mlir")
        if not hivm.exists():
            raise CompileError(f"{name}: {_tail(log)}")
        return hivm.read_text(), tuple(re.findall(r"\[NOTE\] (.*)", log))


def _tail(output: str | bytes) -> str:
    text = output.decode() if isinstance(output, bytes) else output
    errors = [line for line in text.splitlines() if "error:" in line] or text.splitlines()[-5:]
    return "\n".join(errors)


# Reading what it made ----------------------------------------------------------------------------

_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "i64": 8, "i1": 1 / 8}
_CORES = {"AIV": "vector", "AIC": "cube", "MIX": "mixed"}


def _report(name: str, soc: str, hivm: str, notes: tuple[str, ...], seconds: float):
    calls = collections.Counter(re.findall(r"call @([a-z0-9_]+)", hivm))
    loads = sum(n for call, n in calls.items() if call.startswith(("load_gm", "nd2nz")))
    stores = sum(n for call, n in calls.items() if "_to_gm" in call or call.startswith("fixpipe"))
    core = re.search(r"module_core_type<(\w+)>", hivm)
    return CompileReport(
        kernel=name,
        soc=soc,
        core=_CORES[core[1]] if core else "vector",
        ub_bytes=_ub_bytes(hivm),
        scalar_loops=_scalar_loops(hivm),
        loops=len(re.findall(r"\bscf\.(for|while)\b", hivm)),
        loads=loads,
        stores=stores,
        vector_ops=sum(calls.values()) - loads - stores,
        multi_buffer=_keeps_multi_buffer(hivm, notes),
        notes=notes,
        seconds=round(seconds, 2),
    )


def _ub_bytes(hivm: str) -> int:
    """The end of the highest buffer that is placed in the unified buffer."""
    constants = {m[0]: int(m[1]) for m in re.findall(r"(%\w+) = arith.constant (\d+) : i64", hivm)}
    highest = 0
    placed = r"pointer_cast\(([^)]*)\)[^\n]*?memref<((?:\d+x)*)(\w+), #hivm.address_space<ub>>"
    for offsets, shape, dtype in re.findall(placed, hivm):
        elements = 1
        for size in filter(None, shape.split("x")):
            elements *= int(size)
        for offset in offsets.split(","):
            end = constants.get(offset.strip(), 0) + int(elements * _BYTES.get(dtype, 4))
            highest = max(highest, end)
    return highest


def _scalar_loops(hivm: str) -> int:
    """Loops that load or store single elements, indexed by the loop: scalarised vector work."""
    open_loops: list[tuple[str, int]] = []  # induction variable, indentation
    scalar = set()
    for number, line in enumerate(hivm.splitlines()):
        indent = len(line) - len(line.lstrip())
        while open_loops and indent <= open_loops[-1][1] and line.strip():
            open_loops.pop()
        loop = re.search(r"scf\.for (%\w+) =", line)
        if loop:
            open_loops.append((loop[1], indent, number))
        element = re.search(r"memref\.(?:load|store) .*?\[([^\]]*)\]", line)
        if element and open_loops and open_loops[-1][0] in re.findall(r"%\w+", element[1]):
            scalar.add(open_loops[-1][2])
    return len(scalar)


def _keeps_multi_buffer(hivm: str, notes: tuple[str, ...]) -> bool:
    """Whether a buffer alternates between two places; without a loop nothing can overlap."""
    given_up = any("multi-buffer" in note for note in notes)
    alternates = re.search(r"arith\.select %\w+, %\w+, %\w+ : memref<[^\n]*<(ub|cbuf|cc)>", hivm)
    return not given_up and (alternates is not None or "scf.for" not in hivm)


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base, "npu_ops", "compile")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(path: pathlib.Path) -> dict:
    fields = json.loads(path.read_text())
    return fields | {"notes": tuple(fields["notes"])}


def _write(path: pathlib.Path, fields: dict) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(fields, file)
    os.replace(file.name, path)  # another process may write the same


# What our ops launch -----------------------------------------------------------------------------


def launches(op: str, cases: list[str] | None = None, dtypes=None) -> Iterator[Launch]:
    """Every different kernel that an op's cases launch, forward and backward, found by calling it.

    cases: names of the op's cases; None: all. dtypes: None: float32, bfloat16 and float16.
    """
    import torch

    from npu_ops.core import registry

    package = importlib.import_module(f"npu_ops.ops.{op}")
    known = importlib.import_module(f"npu_ops.ops.{op}.cases").CASES
    function = getattr(package, package.__all__[0])
    seen = set()
    for case in known:
        if cases is not None and case.name not in cases:
            continue
        small = dataclasses.replace(case, tokens=min(case.tokens, 8))  # constants know no lengths
        for dtype in dtypes or (torch.float32, torch.bfloat16, torch.float16):
            with recorded(f"{case.name}-{str(dtype).removeprefix('torch.')}") as found:
                with registry.as_if_on("npu"):
                    _forward_and_backward(function, small.inputs(dtype))
            for launch in found:
                key = (launch.name, launch.signature, launch.constants)
                if key not in seen:
                    seen.add(key)
                    yield launch


def _forward_and_backward(function, inputs: dict) -> None:
    import torch

    trained = ("x", "bias", "residual", "q", "k", "v")
    for name in trained:
        if isinstance(inputs.get(name), torch.Tensor):
            inputs[name].requires_grad_()
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


@contextlib.contextmanager
def recorded(case: str) -> Iterator[list[Launch]]:
    """Record the kernels launched in a block instead of running them."""
    _frontend()
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []
    run = JITFunction.run
    JITFunction.run = lambda kernel, *args, grid, warmup, **named: found.append(
        _specialised(case, kernel, args, named)
    )
    try:
        yield found
    finally:
        JITFunction.run = run


def _specialised(case: str, kernel, args: tuple, named: dict) -> Launch:
    bound = inspect.signature(kernel.fn).bind(*args, **named).arguments
    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in bound.items() if value is None}
    signature = {name: _type(value) for name, value in bound.items() if name not in constant}
    constants = {name: value for name, value in bound.items() if name in constant}
    return Launch(case, kernel, tuple(signature.items()), tuple(constants.items()))


_TYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip


def _type(value) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]


# The command -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Compile and print a table; 1 if a kernel does not compile or has a fault."""
    import npu_ops.ops

    known = sorted(path.parent.name for path in _kernel_files(npu_ops.ops))
    parser = argparse.ArgumentParser("npu-ops compile", description=__doc__.partition("\n\n")[0])
    parser.add_argument("ops", nargs="*", help=f"some of {', '.join(known)}; default: all")
    parser.add_argument("--soc", action="append", help=f"default {SOCS[0]}; may be repeated")
    parser.add_argument("--case", action="append", help="a case's name; may be repeated")
    parser.add_argument(
        "--dtype", action="append", help="float32, bfloat16 or float16; default all"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the reports to this file")
    options = parser.parse_args(argv)
    unknown = set(options.ops) - set(known)
    if unknown:
        parser.error(f"ops: got {', '.join(sorted(unknown))}, needs some of {', '.join(known)}")
    try:
        rows = list(_compile_all(options.ops or known, options))
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([row for row, _ in rows], indent=1))
    _print_table([report for _, report in rows if report is not None])
    failed = [row for row, _ in rows if row["faults"]]
    for row in failed:
        print(f"FAULT {row['kernel']} {row['case']} {row['soc']}: {'; '.join(row['faults'])}")
    print(f"{len(rows)} kernels, {len(failed)} with faults ({versions()})")
    return 1 if failed or not rows else 0


def _kernel_files(package) -> list[pathlib.Path]:
    return list(pathlib.Path(package.__path__[0]).glob("*/triton_ascend.py"))


def _compile_all(ops, options) -> Iterator[tuple[dict, CompileReport | None]]:
    import torch

    dtypes = [getattr(torch, name) for name in options.dtype] if options.dtype else None
    for op in ops:
        for launch in launches(op, options.case, dtypes):
            for soc in options.soc or SOCS[:1]:
                row = {"op": op, "case": launch.case, "kernel": launch.name, "soc": soc}
                row["constants"] = dict(launch.constants)
                try:
                    report = compile_launch(launch, soc)
                except CompileError as error:
                    yield row | {"faults": [str(error)]}, None
                    continue
                yield row | dataclasses.asdict(report) | {"faults": report.faults()}, report


def _print_table(reports: list[CompileReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("kernel", "soc", "core", "ub_bytes", "scalar_loops", "loads", "stores", "vector_ops",
               "multi_buffer", "seconds")  # fmt: skip
    table = Table(*columns)
    for report in reports:
        table.add_row(*(str(getattr(report, column)) for column in columns))
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
