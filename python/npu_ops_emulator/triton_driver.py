"""Runs Triton-Ascend kernels on an emulated NPU.

`install()` changes the launch of every `@triton.jit` kernel on tensors of the CPU or the emulated
NPU. The vendor's front end lowers the kernel, the vendor's compiler checks it, and it runs on the
CPU. So a kernel is known to compile, to fit on-chip memory, and to compute the right numbers.
Nothing is known about time, the cube's rounding, or synchronisation between cores and pipes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import os
import sys
import time
import types
import warnings

try:
    import triton.language.extra
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import MLIRCompilationError
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
    from triton.triton_patch.language import core as vendor_language
except ImportError as error:
    raise ImportError(
        f'Triton kernels need triton-ascend ({error}): pip install "triton-ascend==3.2.0"'
    ) from error

from npu_ops_emulator import triton_launch as launch
from npu_ops_emulator import triton_lowering as lowering
from npu_ops_emulator import vendor as tools
from npu_ops_emulator.errors import EmulatorError
from npu_ops_emulator.settings import Settings
from npu_ops_emulator.triton_launch import GridTooLarge, OutOfBounds, Statistics

__all__ = [
    "GridTooLarge",
    "KernelRejected",
    "OutOfBounds",
    "Statistics",
    "compiled_kernels",
    "install",
    "reset_statistics",
    "statistics",
]

_UB_KIB = {False: 192, True: 248}  # unified buffer in KiB; True: of Ascend950


class KernelRejected(MLIRCompilationError):
    """The vendor's compiler rejected a kernel.

    Its base class tells autotuning that a configuration does not fit.
    """

    def __init__(self, message: str):
        self.stage_name = "bishengir-compile"
        self.message = message


def install(
    soc: str | None = None,
    vector_cores: int | None = None,
    cube_cores: int | None = None,
    check_bounds: bool | None = None,
    judge: bool = True,
) -> None:
    """Make this process's Triton launch on an emulated NPU. Call it again to change options.

    Call it before modules with `@triton.autotune` are imported: the decorator uses the driver. The
    defaults are those of this process's emulated machine, if it has one.

    Args:
        soc: the target of the vendor's compiler, e.g. Ascend910B3 (the default), Ascend910_9391,
            Ascend950.
        vector_cores, cube_cores: core counts that the driver reports to launchers; default 48 and
            24.
        check_bounds: raise OutOfBounds before a kernel reads or writes outside its tensors' memory.
            Default: no.
        judge: let the vendor's compiler check that each kernel fits the NPU. Without this check,
            kernels compile faster, and a kernel that overflows on-chip memory runs.

    Raises:
        EmulatorError: Triton is not Ascend's.
        FileNotFoundError: the vendor's compiler is missing.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        warnings.warn(
            "TRITON_INTERPRET=1: Triton interprets all kernels in Python. It compiles none, and "
            "the emulated NPU runs none",
            stacklevel=2,
        )
    if os.environ.get("NPU_OPS_EMULATOR") == "1":
        machine = Settings.current()
        soc = soc or machine.soc
        vector_cores = vector_cores or 2 * machine.cores
        cube_cores = cube_cores or machine.cores
        check_bounds = machine.check_bounds if check_bounds is None else check_bounds
    # Separate from a real NPU's cache, which has other binaries for the same keys.
    os.environ.setdefault("TRITON_CACHE_DIR", str(lowering.cache_folder() / "front_end"))
    if "ascend" not in backends:
        raise EmulatorError('this Triton has no Ascend backend: pip install "triton-ascend==3.2.0"')
    target = lowering.Target(soc or "Ascend910B3")
    tools.tool("bishengir-compile")
    # Libraries that cannot ask CANN size tiles by this variable; the default is 64 KiB.
    bits = _UB_KIB[target.next_generation] << 13
    os.environ.setdefault("ASCEND_UB_CAPACITY_BITS", str(bits))
    launch.check_bounds = bool(check_bounds)
    _patch_backend(backends["ascend"].compiler, target, judge)
    _patch_front_end(target)
    _provide_cann_module()
    driver.set_active(Driver(target.soc, vector_cores or 48, cube_cores or 24))


def statistics() -> dict[str, Statistics]:
    """Return each kernel's statistics since the process began or `reset_statistics` was called."""
    return {
        name: dataclasses.replace(k, arguments=dict(k.arguments))
        for name, k in launch.kernels.items()
    }


def reset_statistics() -> None:
    launch.kernels.clear()


def compiled_kernels() -> list[str]:
    """Return the names of the kernels that this process compiled, not loaded from the cache."""
    return list(lowering.compiled)


class Driver:
    """Triton's driver interface for the emulated device."""

    def __init__(self, soc: str, vector_cores: int, cube_cores: int):
        self.utils = Utils(soc, vector_cores, cube_cores)
        self.launcher_cls = launch.Launcher

    def get_current_target(self):
        return GPUTarget("npu", self.utils.soc, 0)

    def get_current_device(self) -> int:
        npu = launch.torch_npu()
        return npu.current_device() if npu else 0

    def set_current_device(self, device: int) -> None:
        npu = launch.torch_npu()
        if npu:
            npu.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0  # a launch runs synchronously, after the device's queue

    def get_device_interface(self):
        return launch.torch_npu() or HostInterface

    def get_benchmarker(self):
        return run_once

    def get_empty_cache_for_benchmark(self):
        import torch

        return torch.empty(1, dtype=torch.int32)


class Utils:
    """Triton's interface for device properties."""

    def __init__(self, soc: str, vector_cores: int, cube_cores: int):
        self.soc, self.vector_cores, self.cube_cores = soc, vector_cores, cube_cores

    def get_device_properties(self, device) -> dict[str, int]:
        # max_shared_mem is 1, as in the vendor's driver: the compiler checks on-chip memory.
        return {
            "max_shared_mem": 1,
            "num_aicore": self.cube_cores,
            "num_vectorcore": self.vector_cores,
        }

    def get_aicore_num(self) -> int:
        return self.cube_cores

    def get_aivector_core_num(self) -> int:
        return self.vector_cores

    def get_arch(self) -> str:
        return self.soc

    def load_binary(self, name: str, kernel: bytes, shared: int, device):
        try:
            loaded = launch.Loaded(kernel)
        except lowering.NotLowered as error:
            raise _not_executable(name.split()[0], error) from None
        return loaded.library, loaded, 0, 0


class HostInterface:
    """The part of torch.npu that benchmarks use, on the host's clock; used without torch_npu."""

    class Event:
        def __init__(self, enable_timing: bool = False):
            self.time = 0.0

        def record(self) -> None:
            self.time = time.perf_counter()

        def elapsed_time(self, end) -> float:
            return (end.time - self.time) * 1e3

    @staticmethod
    def synchronize(device=None) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0


def run_once(function, quantiles=None, **_):
    """Replace the benchmark of `triton.autotune`: every configuration that runs gets the same time.

    Times here say nothing about an NPU, so the first configuration that compiles is chosen.
    """
    function()
    return [1.0] * len(quantiles) if quantiles else 1.0


def _patch_backend(backend, target: lowering.Target, judge: bool) -> None:
    """Replace the vendor backend's last stage, and add the options of later releases."""
    # The module is loaded under a private name, so get its globals from a method.
    vendor = backend.add_stages.__globals__
    original = vendor.setdefault("_npu_ops_options", vendor["NPUOptions"])
    extra = [
        (name, object, dataclasses.field(default=None))
        for name in lowering.LATER_OPTIONS
        if name not in original.__dataclass_fields__
    ]
    if target.next_generation:  # as the vendor's module does on such an NPU
        changed = {
            "compile_on_910_95": True,
            "multibuffer": False,
            "enable_auto_bind_sub_block": False,
            "enable_select_analysis": True,
        }
        extra += [(name, bool, dataclasses.field(default=v)) for name, v in changed.items()]
    vendor["NPUOptions"] = dataclasses.make_dataclass(
        "NPUOptions", extra, bases=(original,), frozen=True
    )

    def binary(linalg: str, metadata: dict, options) -> bytes:
        linalg, metadata = vendor["_parse_linalg_metadata"](linalg, metadata)
        with _one_process_at_a_time(linalg):
            return lowering.build(linalg, metadata, target, judge)

    front_end = vendor.setdefault("_npu_ops_front_end", vendor["ttir_to_linalg"])
    vendor["ttir_to_linalg"] = functools.partial(tools.retried, front_end)
    for name in (
        "linalg_to_bin_enable_npu_compile_A2_A3",
        "linalg_to_bin_enable_npu_compile_910_95",
    ):
        vendor[name] = binary
    key = f"emulated-{judge}-{lowering.fingerprint()}"
    backend.hash = lambda self: f"{self.target}-{key}"


@contextlib.contextmanager
def _one_process_at_a_time(linalg: str):
    """Lock a kernel: if several processes need it, as ranks do, one compiles it for all."""
    name = lowering.digest(linalg.encode())[:2]  # a few hundred locks serve all kernels
    with open(lowering.cache_folder() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _patch_front_end(npu: lowering.Target) -> None:
    """Name the kernel in the errors of a failed compilation and of a grid that is too large."""
    compile_ = getattr(triton.compiler.compile, "original", triton.compiler.compile)
    run = getattr(JITFunction.run, "original", JITFunction.run)

    def compile_named(src, target=None, options=None):
        try:
            return compile_(src, target=target, options=options)
        except Exception as error:
            cause = error.__context__
            if isinstance(cause, lowering.Rejected):
                raise KernelRejected(_rejection_text(src, cause, npu)) from None
            if isinstance(cause, lowering.NotLowered):
                raise _not_executable(src.name, cause) from None
            raise

    def run_named(self, *args, grid, **kwargs):
        def checked(arguments):
            sizes = grid(arguments) if callable(grid) else grid
            sizes = (*sizes, 1, 1)[:3]
            launch.check_grid(self.__name__, sizes)
            return sizes

        return run(self, *args, grid=checked if grid is not None else None, **kwargs)

    compile_named.original, run_named.original = compile_, run
    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = compile_named
    JITFunction.run = run_named


def _not_executable(kernel: str, cause: lowering.NotLowered) -> NotImplementedError:
    return NotImplementedError(f"kernel {kernel} compiles, but cannot be executed here: {cause}")


def _rejection_text(src, cause: lowering.Rejected, target: lowering.Target) -> str:
    constants = ", ".join(
        f"{name}={value}" for name, value in src.constants.items() if value is not None
    )
    types_ = ", ".join(f"{n}: {t}" for n, t in src.signature.items() if n not in src.constants)
    return (
        f"kernel {src.name} ({types_}) with {constants or 'no constants'} does not compile for "
        f"{target.soc}, which has {_UB_KIB[target.next_generation]} KiB of unified buffer a core:\n"
        f"{cause}"
    )


def _provide_cann_module() -> None:
    """Provide `triton.language.extra.cann` of later releases, with this release's functions."""
    name = "triton.language.extra.cann"
    with contextlib.suppress(ImportError):
        if not getattr(importlib.import_module(name), "npu_ops", False):
            return
    package, extension = types.ModuleType(name), types.ModuleType(f"{name}.extension")
    public = {key: value for key, value in vars(vendor_language).items() if not key.startswith("_")}
    for module in (package, extension):
        vars(module).update(public)
    package.npu_ops, package.__path__, package.extension = True, [], extension
    triton.language.extra.cann = package
    sys.modules |= {name: package, f"{name}.extension": extension}
