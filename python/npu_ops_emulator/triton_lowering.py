"""Lowers a Triton kernel's IR twice: to HIVM, to check that it fits the NPU, and to CPU code.

linalg -> HIVM          ascendnpu-ir's bishengir-compile plans UB, L1 and L0 as for an NPU. It stops
                        at `hivmc`, which no wheel contains. All steps that can fail come earlier.
linalg -> LLVM dialect  ascendnpu-ir's bishengir-opt
LLVM dialect -> .so     triton's translation, llvmlite's optimiser, gcc
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import tempfile

from npu_ops_emulator import build as sources
from npu_ops_emulator import vendor
from npu_ops_emulator.triton_rewrite import HOOK, Kernel, Unsupported

# names of the kernels that this process compiled, not loaded from the cache
compiled: list[str] = []

_PASSES = (
    "--execution-engine-convert-hfusion-to-upstream",
    "--execution-engine-convert-hivm-to-upstream",
    "--convert-elementwise-to-linalg",
    "--linalg-fuse-elementwise-ops",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
    "--annotation-lowering",
    "--expand-strided-metadata",
    "--convert-linalg-to-loops",
    "--canonicalize",
    "--convert-scf-to-cf",
    "--math-legalize-to-f32",  # crashes bishengir-opt 1.2.0 if there are structured branches
    "--lower-affine",
    "--arith-emulate-unsupported-floats=source-types=bf16 target-type=f32",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
# The check skips the pass that makes pipes of a core wait for each other. That pass takes 80 % of
# the compile time, and emulated pipes always wait. `npu-ops compile` runs it.
_UNJUDGED = ("--disable-hivm-auto-inject-sync",)
# Launch options of the vendor's backend -> flags of its compiler.
_FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": (
        "limit-auto-multi-buffer-only-for-local-buffer"
    ),
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
    "disable_auto_inject_block_sync": "disable-auto-inject-block-sync",
    # Options of releases after triton-ascend 3.2.0, for which this compiler already has flags.
    "enable_ubuf_saving": "enable-ubuf-saving",
}
LATER_OPTIONS = ("enable_ubuf_saving",)


class Rejected(Exception):
    """The vendor's compiler rejected a kernel; the message is the compiler's."""


class NotLowered(Exception):
    """The vendor's compiler accepts the kernel, but it cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Target:
    """An NPU to compile for. soc: its name, as users write it; `compiler_name`: the compiler's."""

    soc: str

    @property
    def next_generation(self) -> bool:
        return self.soc.startswith(("Ascend950", "Ascend910_95"))

    @property
    def compiler_name(self) -> str:
        return {"Ascend950": "Ascend950PR_9599"}.get(self.soc, self.soc)


def cache_folder() -> pathlib.Path:
    """Return the folder of compiled kernels, which all processes share."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(root) / "npu_ops" / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:40]


def store(path: pathlib.Path, data: bytes) -> None:
    """Write a file of the cache atomically."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def runtime_source() -> pathlib.Path:
    """Return the C++ file with the functions that kernels call."""
    return next(path for path in sources.sources() if path.name == "triton_runtime.cpp")


@functools.cache
def fingerprint() -> str:
    """Return a hash of everything that affects compilation, except the kernel itself."""
    import llvmlite.binding as llvm

    here = pathlib.Path(__file__)
    files = (here, here.with_name("triton_rewrite.py"), runtime_source())
    parts = [path.read_text() for path in files]
    for package in ("triton-ascend", "ascendnpu-ir", "llvmlite"):
        try:
            parts.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            parts.append("")
    compiler = os.stat(vendor.tool("bishengir-compile"))
    parts += [str(compiler.st_size), llvm.get_host_cpu_name()]
    parts.append(llvm.get_host_cpu_features().flatten())
    return digest("\0".join(parts).encode())


def build(linalg: str, options: dict, target: Target, judge: bool) -> bytes:
    """Return a shared object of the kernel, from the cache if possible.

    Args:
        linalg: the kernel, as the vendor's front end passes it to the vendor's compiler.
        options: launch options, by their names in `triton_launch`.
        judge: let the vendor's compiler check that the kernel fits the NPU.

    Raises:
        Rejected: the kernel does not fit the NPU.
        NotLowered: the kernel fits, but cannot run on the CPU.
    """
    flags = compiler_flags(options, target)
    key = "\0".join([linalg, *flags, fingerprint()])
    entry = cache_folder() / f"{digest(key.encode())}.json"
    known = json.loads(entry.read_text()) if entry.exists() else {}
    made = known and object_path(known["object"])
    if made and made.exists() and (known["judged"] or not judge):
        return made.read_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "kernel.mlir").write_text(linalg)
        compiler = _start_judge(folder, *flags) if judge else None
        try:
            kernel = Kernel(linalg)
            compiled.append(kernel.name)
            data = _shared_object(kernel, folder)
        except Unsupported as error:
            raise NotLowered(str(error)) from error
        finally:  # the vendor's error takes precedence: it is about the user's kernel
            notes = _judge(*_finish(compiler)) if compiler else []
    known = {"object": digest(data), "judged": judge, "notes": notes}
    store(object_path(known["object"]), data)
    store(entry, json.dumps(known).encode())
    return data


def object_path(name: str) -> pathlib.Path:
    """Return the path of the shared object `name`, a digest of its content."""
    return cache_folder() / f"{name}.so"


def compiler_flags(options: dict, target: Target) -> list[str]:
    """Return the vendor backend's flags for `bishengir-compile`, without file names."""
    flags = [f"--target={target.compiler_name}"]
    for option, flag in _FLAGS.items():
        value = options.get(option)
        if value is not None:
            flags.append(f"--{flag}={str(value).lower() if isinstance(value, bool) else value}")
    flags += ["--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true"]
    if not target.next_generation:
        flags.append("--enable-hivm-compile=true")
    if os.environ.get("TRITON_ALL_BLOCKS_PARALLEL", "0") in ("1", "true"):
        flags.append("--enable-auto-blockify-loop")
    return flags


def _judge(log: str, status: int) -> list[str]:
    """Return the compiler's notes on a kernel that it accepts.

    The compiler calls `hivmc`, which only CANN has, after all steps that can fail. So without CANN,
    a missing `hivmc` as the only error means that the kernel is accepted.
    """
    wrong = [line for line in log.splitlines() if "error:" in line and "hivmc" not in line]
    if status == 0 or (status > 0 and "Cannot find hivmc" in log and not wrong):
        return [line.strip() for line in log.splitlines() if "[NOTE]" in line]
    raise Rejected(_complaint(log) or f"the compiler ended with status {status}")


def _complaint(log: str) -> str:
    """Return the lines of a compiler's log that describe the error, the reason first."""
    lines = [re.sub(r"^loc\(.*?\): ", "", line.strip()) for line in log.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and "hivmc" not in line]
    words = r"error:|\[NOTE\]"
    kept = [line for line in lines if re.search(words, line) and "Failed to run" not in line]
    return "\n".join(sorted(kept[:12], key=lambda line: "[NOTE]" in line) or lines[-12:])


def _start_judge(folder: pathlib.Path, *flags: str) -> subprocess.Popen:
    program = vendor.tool("bishengir-compile")
    return subprocess.Popen(
        [program, "kernel.mlir", *flags, *_UNJUDGED, "-o", "out"],
        cwd=folder, text=True, env=vendor.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _finish(process: subprocess.Popen) -> tuple[str, int]:
    """Return a process's output and its exit status, which is negative for a signal."""
    log, _ = process.communicate()
    return log, process.returncode


def _shared_object(kernel: Kernel, folder: pathlib.Path) -> bytes:
    (folder / "rewritten.mlir").write_text(kernel.text)
    command = [vendor.tool("bishengir-opt"), "rewritten.mlir", *_PASSES, "-o", "lowered.mlir"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise NotLowered(_complaint(done.stdout + done.stderr))
    code = _llvm_ir(folder / "lowered.mlir") + _entry(kernel)
    machine_code = _machine_code(code, vectorise=kernel.multiplies)
    (folder / "kernel.o").write_bytes(machine_code)
    command = [*sources.compiler(), "-shared", "-o", "kernel.so", "kernel.o", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "kernel.so").read_bytes()


def _llvm_ir(path: pathlib.Path) -> str:
    from triton._C.libtriton import ir, llvm

    context = ir.context()
    ir.load_dialects(context)
    text = str(llvm.to_module(ir.parse_mlir_module(str(path), context), llvm.context()))
    return re.sub(rf"^declare void @{HOOK}_.*\n", "", text, flags=re.MULTILINE)


def _machine_code(text: str, vectorise: bool) -> bytes:
    """Compile LLVM IR to an object file.

    Vectorization makes compilation take four times as long. That pays off for matrix products,
    which run ten times as fast. Element-wise code runs only three times as fast, and kernels of
    tests run for milliseconds.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    try:
        module = llvm.parse_assembly(text)
    except RuntimeError as error:
        raise NotLowered(str(error)) from error
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(),
        opt=2 if vectorise else 1, reloc="pic", codemodel="default",
    )  # fmt: skip
    # Never unroll: it doubles the compile time and does not speed up the kernels.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2 if vectorise else 0)
    tuning.loop_vectorization, tuning.loop_unrolling = vectorise, False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


_LLVM_TYPES = {"f32": "float", "f64": "double", "f16": "half", "bf16": "bfloat", "index": "i64"}


def _entry(kernel: Kernel) -> str:
    """Return LLVM IR of two functions that connect a kernel to the runtime.

    `npu_ops_program` takes the arguments as an array of eight-byte slots, each a pointer or a
    scalar. The hooks put sizes and strides of an access into an array. The IR also contains what a
    launch must know about the kernel, so that only the shared object has to be cached.
    """
    body, arguments = [], []
    user, unwatched = kernel.parameters[:-6], " ".join(sorted(kernel.unwatched))
    for i, kind in enumerate(user):
        body.append(f"  %slot{i} = getelementptr i64, ptr %arguments, i64 {i}")
        scalar = "ptr" if kind.startswith("memref") else _LLVM_TYPES.get(kind, kind)
        body.append(f"  %value{i} = load {scalar}, ptr %slot{i}")
        arguments.append(f"{scalar} %value{i}")
        if scalar == "ptr":
            arguments += [f"ptr %value{i}", "i64 0", f"i64 {1 << 40}", "i64 1"]
    place = [f"i32 %{name}" for name in ("gx", "gy", "gz", "x", "y", "z")]
    lines = [
        f"define void @npu_ops_program(ptr %arguments, {', '.join(place)}) {{",
        *body,
        f"  call void @{kernel.name}({', '.join(arguments + place)})",
        "  ret void",
        "}",
        f"declare void @{HOOK}(i64, i64, i64, i64, i64, ptr)",
        f"@npu_ops_sequential = constant i32 {int(kernel.sequential)}",
        f'@npu_ops_unwatched = constant [{len(unwatched) + 1} x i8] c"{unwatched}\\00"',
    ]
    for rank in sorted(int(r) for r in set(re.findall(rf"private @{HOOK}_(\d+)", kernel.text))):
        names = [f"i64 %v{i}" for i in range(2 * rank)]
        parameters = ", ".join(["i64 %kind", "i64 %bytes", "i64 %base", "i64 %offset", *names])
        lines += [
            f"define internal void @{HOOK}_{rank}({parameters}) alwaysinline {{",
            f"  %values = alloca [{2 * rank} x i64]",
        ]
        for i in range(2 * rank):
            lines.append(f"  %p{i} = getelementptr i64, ptr %values, i64 {i}")
            lines.append(f"  store i64 %v{i}, ptr %p{i}")
        lines += [
            f"  call void @{HOOK}(i64 %kind, i64 %bytes, i64 %base, i64 %offset, i64 {rank}, "
            "ptr %values)",
            "  ret void",
            "}",
        ]
    return "\n" + "\n".join(lines) + "\n"
