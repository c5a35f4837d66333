"""Launches compiled Triton kernels: arguments, threads, statistics, bounds checks."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import warnings

from npu_ops_emulator import build, graph
from npu_ops_emulator import triton_lowering as lowering

GRID_LIMIT = 65535


class OutOfBounds(RuntimeError):
    """A kernel accessed memory outside its tensors; raised with `check_bounds`."""


class GridTooLarge(RuntimeError):
    """A launch has more programs than the NPU's runtime accepts."""


@dataclasses.dataclass
class Statistics:
    """Totals of a kernel's launches.

    Attributes:
        launches, programs: numbers of launches and programs that ran.
        bytes_loaded, bytes_stored: moved from and to global memory. Masked-off elements count if
            the compiled kernel moves them: a gather reads its masked elements, a block does not.
        arguments: (bytes loaded, bytes stored) by argument name. If several arguments point to the
            same byte, the first of them counts.
    """

    launches: int = 0
    programs: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    arguments: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def add(self, programs: int, moved: dict[str, tuple[int, int]]) -> None:
        self.launches += 1
        self.programs += programs
        for name, (loaded, stored) in moved.items():
            before = self.arguments.get(name, (0, 0))
            self.arguments[name] = (before[0] + loaded, before[1] + stored)
            self.bytes_loaded += loaded
            self.bytes_stored += stored


kernels: dict[str, Statistics] = {}
check_bounds = False
_lock = threading.Lock()


class _Argument(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_size_t),
        ("low", ctypes.c_size_t),
        ("high", ctypes.c_size_t),
        ("loaded", ctypes.c_int64),
        ("stored", ctypes.c_int64),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("argument", "kind", "first", "end", "program")]


_SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_bool,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


@functools.cache
def runtime() -> ctypes.CDLL:
    """Return the library that runs kernels (triton_runtime.cpp), built once for all processes."""
    library = ctypes.CDLL(None)  # in a process with the emulated NPU, it is already loaded
    if not hasattr(library, "npu_ops_launch"):
        # Global, so that the kernels' shared objects find its functions.
        library = ctypes.CDLL(_build_runtime(), mode=ctypes.RTLD_GLOBAL)
    library.npu_ops_launch.restype = ctypes.c_int
    library.npu_ops_launch.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] + [
        ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def _build_runtime() -> pathlib.Path:
    source = lowering.runtime_source()
    path = lowering.cache_folder() / f"runtime-{lowering.digest(source.read_bytes())}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "runtime.so"
            flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-o", made]
            subprocess.run([*build.compiler(), *flags, source], check=True)
            lowering.store(path, made.read_bytes())
    return path


class Loaded:
    """A kernel's shared object, loaded in this process."""

    def __init__(self, data: bytes):
        runtime()
        path = lowering.object_path(lowering.digest(data))
        if not path.exists():
            lowering.store(path, data)
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            missing = str(error).rpartition("undefined symbol: ")[2]
            raise lowering.NotLowered(f"it calls {missing}, which has no CPU version") from error
        self.program = ctypes.cast(self.library.npu_ops_program, ctypes.c_void_p)
        self.sequential = bool(ctypes.c_int32.in_dll(self.library, "npu_ops_sequential").value)
        text = ctypes.addressof(ctypes.c_char.in_dll(self.library, "npu_ops_unwatched"))
        self.unwatched = ctypes.string_at(text).decode()


class Launcher:
    """Triton's launcher for one compiled kernel."""

    def __init__(self, src, metadata):
        self.name = src.fn.__name__
        # A specialised argument (None, 1) is a constant in the kernel's code, not a parameter.
        self.parameters = [
            (position, name, kind)
            for position, (name, kind) in enumerate(src.signature.items())
            if name not in src.constants
        ]
        self.pointers = [
            (position, name) for position, name, kind in self.parameters if kind[0] == "*"
        ]

    def __call__(
        self, gx, gy, gz, stream, loaded, packed, launch_metadata, enter, leave, *arguments
    ):
        programs = gx * gy * gz
        if programs == 0:
            return
        check_grid(self.name, (gx, gy, gz))
        tensors = {position: arguments[position] for position, _ in self.pointers}
        self._settle(arguments)
        if enter is not None:
            enter(launch_metadata)
        table = (_Argument * max(1, len(self.pointers)))(*map(_extent, tensors.values()))
        slots, fault = self._slots(arguments), _Fault()

        def run() -> int:
            faults = runtime().npu_ops_launch(
                loaded.program,
                slots,
                (ctypes.c_int32 * 3)(gx, gy, gz),
                table,
                len(self.pointers),
                check_bounds,
                1 if loaded.sequential else threads(),
                ctypes.byref(fault),
            )
            moved = {
                name: (a.loaded, a.stored)
                for (_, name), a in zip(self.pointers, table, strict=False)
            }
            with _lock:
                kernels.setdefault(self.name, Statistics()).add(programs, moved)
            return faults

        if run():
            _, name = self.pointers[fault.argument]
            tensor = tensors[self.pointers[fault.argument][0]]
            raise OutOfBounds(self._fault_text(fault, name, tensor, (gx, gy, gz)))
        graph.record(run)
        if check_bounds and loaded.unwatched:
            _warn_once(f"kernel {self.name}: {loaded.unwatched} is not checked by check_bounds")
        if leave is not None:
            leave(launch_metadata)

    def _settle(self, arguments) -> None:
        """Reject memory that the NPU cannot access, and wait for the NPU's queue."""
        npu = torch_npu()
        if npu is None:
            return
        here = npu.current_device()
        for position, name in self.pointers:
            device = getattr(arguments[position], "device", None)
            if device is not None and (device.type, device.index) != ("npu", here):
                raise ValueError(
                    f"kernel {self.name}: argument {name!r} is on {device}, the launch on "
                    f"npu:{here}; a kernel can access only the memory of its own NPU"
                )
        with graph.waiting():
            npu.synchronize()

    def _slots(self, arguments):
        """Return the arguments as eight-byte slots, after two null pointers: lock and workspace."""
        slots = (ctypes.c_int64 * (2 + len(self.parameters)))()
        address = ctypes.addressof(slots) + 16
        for i, (position, name, kind) in enumerate(self.parameters):
            value = arguments[position]
            if kind[0] == "*":
                slots[2 + i] = value.data_ptr() if hasattr(value, "data_ptr") else value
            elif kind in _SCALARS:
                _SCALARS[kind].from_address(address + 8 * i).value = value
            else:
                raise TypeError(
                    f"kernel {self.name}, argument {name}: type {kind} cannot be passed"
                )
        return slots

    def _fault_text(self, fault, name, argument, grid) -> str:
        x, row = fault.program % grid[0], fault.program // grid[0]
        place = (x, row % grid[1], row // grid[1])
        tensor = getattr(argument, "base", None) if not hasattr(argument, "shape") else argument
        shape = (
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            if tensor is not None
            else ""
        )
        memory = _extent(argument)
        return (
            f"kernel {self.name}, program {place} of {grid}: "
            f"{'writes' if fault.kind else 'reads'} bytes {fault.first} to {fault.end} of argument "
            f"{name!r} ({shape}), whose memory is bytes {memory.low - memory.base} to "
            f"{memory.high - memory.base}, counted from its first element"
        )


def threads() -> int:
    """Return how many programs run at a time: OMP_NUM_THREADS, else one per CPU."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_grid(name: str, grid) -> None:
    """Reject grids that the NPU's runtime rejects, unless its switch for larger grids is on."""
    programs = math.prod(grid)
    if programs <= GRID_LIMIT or os.environ.get("TRITON_ALL_BLOCKS_PARALLEL", "0") != "0":
        return
    sizes = " x ".join(map(str, grid))
    raise GridTooLarge(
        f"kernel {name}: a grid of {sizes} programs; one launch takes at most {GRID_LIMIT}. "
        "Launch as many programs as the NPU has cores and loop inside"
    )


def _extent(argument) -> _Argument:
    """Return the memory range of a pointer argument; a bare address has no range."""
    tensor = argument if hasattr(argument, "untyped_storage") else getattr(argument, "base", None)
    if tensor is None:
        address = argument if isinstance(argument, int) else argument.data_ptr()
        return _Argument(address, low=1, high=0)
    storage = tensor.untyped_storage()
    low = storage.data_ptr()
    return _Argument(tensor.data_ptr(), low, low + storage.nbytes())


def torch_npu():
    """Return `torch.npu`; None without torch_npu, because kernels then use CPU tensors."""
    return getattr(sys.modules.get("torch"), "npu", None) if "torch_npu" in sys.modules else None


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)
