"""An NPU in software: the real torch_npu on a runtime in host memory.

    npu-ops emulate -- python train.py          any command, and its child processes
    npu_ops_emulator.install()                  this process, e.g. in conftest.py

It tests registration, dispatch, argument checks, streams and arithmetic. It says nothing about
device time, the rounding of matrix units, or synchronisation inside a kernel.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from collections.abc import Callable

from npu_ops_emulator import build, headers, wheels
from npu_ops_emulator.errors import EmulatorError
from npu_ops_emulator.settings import Settings

__all__ = ["EmulatorError", "Settings", "environment", "install", "installed", "status"]


def environment(settings: Settings | None = None, torch_npu: str | None = None) -> dict[str, str]:
    """Return environment variables that give a new process, and its children, the emulated NPU.

    Build the emulator if necessary.

    torch_npu: a wheel or a folder of wheels; default: $NPU_OPS_TORCH_NPU, else pip finds one.

    Raises:
        EmulatorError: the emulator cannot be built.
    """
    libraries = build.ensure(torch_npu)
    startup = pathlib.Path(__file__).parent / "startup"
    return {
        **(settings or Settings()).environment(),
        "LD_LIBRARY_PATH": _prepend(str(libraries), "LD_LIBRARY_PATH"),
        "PYTHONPATH": _prepend(f"{startup}{os.pathsep}{wheels.folder()}", "PYTHONPATH"),
        "NPU_OPS_EMULATOR": "1",
    }


def install(settings: Settings | None = None, torch_npu: str | None = None) -> None:
    """Give this process the emulated NPU: afterwards `torch.npu` and `import torch_npu` work.

    Call it before anything imports torch_npu. `settings` cannot change afterwards.

    torch_npu: as for `environment`.

    Raises:
        EmulatorError: the emulator cannot be built, torch_npu is already imported, or this process
            has an emulated NPU with other settings.
    """
    if installed():
        if settings not in (None, Settings.current()):
            raise EmulatorError(f"install(): this process already has {Settings.current()}")
        return
    if "torch_npu" in sys.modules:
        raise EmulatorError("install() must come before `import torch_npu`")
    libraries = build.ensure(torch_npu)
    os.environ.update((settings or Settings.current()).environment())
    os.environ["NPU_OPS_EMULATOR"] = "1"
    _import_torch()
    for name in (build.LIBRARY, *build.NAMES):
        ctypes.CDLL(str(libraries / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(wheels.folder()))
    from npu_ops_emulator import runtime

    runtime.start()
    import torch_npu  # noqa: F401


def installed() -> bool:
    """Return whether this process runs on the emulated NPU."""
    return "torch_npu" in sys.modules and os.environ.get("NPU_OPS_EMULATOR") == "1"


def status() -> dict[str, str]:
    """Return, for each part of the emulator, its version or folder, or why it is missing.

    Builds nothing.
    """
    torch_npu = wheels.torch_npu_version()
    installed_in = f"in {wheels.folder()}" if wheels.is_installed() else "not installed yet"
    return {
        "torch": wheels.torch_version(),
        "torch_npu": f"{torch_npu}, {installed_in}",
        "library": str(build.folder()) if build.is_built() else "not built yet",
        "compiler": _or_why_not(lambda: " ".join(build.compiler())),
        "triton-ascend": _or_why_not(lambda: wheels.version("triton-ascend")),
        "AscendC headers": headers.why_not() or f"in {headers.source()}",
        "ascendnpu-ir": _or_why_not(lambda: wheels.version("ascendnpu-ir")),
    }


def _or_why_not(answer: Callable[[], str]) -> str:
    try:
        return answer()
    except EmulatorError as error:
        return str(error)


def _prepend(value: str, variable: str) -> str:
    before = os.environ.get(variable)
    return f"{value}{os.pathsep}{before}" if before else value


def _import_torch() -> None:
    """Import torch without autoloading backends: the emulated NPU is not ready yet."""
    before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch  # noqa: F401
    finally:
        if before is None:
            del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        else:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = before
