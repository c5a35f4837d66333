"""Records launches of other projects' Triton-Ascend kernels from checkouts, without an NPU.

`import_from` makes a project's modules importable; no file of it is changed or copied. Launches are
recorded on CPU tensors and never run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import types
from unittest import mock

from npu_ops_emulator import vendor
from npu_ops_tools.compile.launches import Launch, recorded

from npu_ops.core import env

CORES = 24, 48  # cube and vector cores of an Ascend910B2
UB_BITS = 192 * 1024 * 8
# For each option: the project, its package, and the folder of the package's modules.
PROJECTS = {
    "sgl": ("sgl-kernel-npu", "sgl_kernel_npu", "python/sgl_kernel_npu/sgl_kernel_npu"),
    "vllm": ("vllm-ascend", "vllm_ascend", "vllm_ascend"),
    "vllm_released": ("vllm-ascend's release", "vllm_ascend", "vllm_ascend"),
    "liger": ("Liger-Kernel", "liger_kernel", "src/liger_kernel"),
    "fla": ("flash-linear-attention", "fla", "fla"),
    "mindspeed": ("MindSpeed", "mindspeed", "mindspeed"),
}


def import_from(checkouts: dict[str, pathlib.Path]) -> dict[str, str]:
    """Make the projects of these options importable; return each checkout's version by option."""
    if {"vllm", "vllm_released"} <= set(checkouts):
        raise SystemExit("--vllm-released: got both, needs a run without --vllm: one module name")
    _pretend()
    for option, checkout in checkouts.items():
        _, package, folder = PROJECTS[option]
        home = checkout / folder
        if not home.is_dir():
            raise SystemExit(f"--{option}: got {checkout}, needs a checkout with {folder}")
        _packages(package, home)
    _fill_in(checkouts)
    return {option: _version(option, checkout) for option, checkout in checkouts.items()}


def launches(function: str, arguments: dict) -> list[Launch]:
    """Return the launches of "module:function"."""
    module, _, name = function.partition(":")
    # Else npu-ops would replace functions of the projects as their modules are imported.
    with env.override(disable=frozenset({"all"})), recorded("") as found:
        getattr(importlib.import_module(module), name)(**arguments)
    # Remove options that this triton-ascend does not know: those of Triton for NVIDIA, and of later
    # releases of triton-ascend.
    foreign = ("num_warps", "num_stages", "num_ctas", "maxnreg", "unit_flag")
    return [
        dataclasses.replace(x, options=tuple(o for o in x.options if o[0] not in foreign))
        for x in found
    ]


def _pretend() -> None:
    """Replace the functions by which the projects ask Triton and torch about the device."""
    vendor.frontend()
    import torch
    import triton
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    # The kernels import these from a module of later triton-ascend releases. 3.2.0 has them in
    # triton.language.
    slices = {name: getattr(tl, name) for name in ("extract_slice", "insert_slice", "get_element")}
    _module("triton.language.extra.cann", __path__=[])
    _module("triton.language.extra.cann.extension", **slices)
    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(UB_BITS)  # else CANN would be asked
    known = {"num_aicore": CORES[0], "num_vectorcore": CORES[1]}
    target = types.SimpleNamespace(backend="npu", arch="Ascend910B2")
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: known),
        get_current_target=lambda: target,
        get_benchmarker=lambda: None,
    )
    triton.runtime.driver.set_active(driver)
    torch.npu = types.SimpleNamespace(
        current_device=lambda: 0,
        device=lambda index: contextlib.nullcontext(),
        is_available=lambda: False,
    )
    # Tuning would time kernels, so the first configuration is used.
    Autotuner.run = lambda tuner, *args, **named: tuner.fn.run(
        *args, **named, **tuner.configs[0].kwargs
    )


def _packages(package: str, home: pathlib.Path) -> None:
    """Make every folder a package without executing its __init__.

    The projects' __init__ would load compiled operators, or ask for a GPU.
    """
    for folder in (home, *(path.parent for path in home.rglob("__init__.py"))):
        name = ".".join((package, *folder.relative_to(home).parts))
        _module(name, __path__=[str(folder)])


def _fill_in(checkouts: dict) -> None:
    """Set the names that the kernels' modules import from packages that were not executed."""
    import torch
    import triton
    import triton.language as tl

    if "sgl" in checkouts:
        _module("sgl_kernel_npu.utils.triton_utils", get_device_properties=lambda: CORES)
    if {"vllm", "vllm_released"} & set(checkouts):
        _module("vllm", __path__=[])
        _module("vllm.triton_utils", HAS_TRITON=True, tl=tl, tldevice=None, triton=triton)
        for name in ("v1", "v1.attention", "v1.attention.backends"):
            _module(f"vllm.{name}", __path__=[])
        _module("vllm.v1.attention.backends.utils", PAD_SLOT_ID=-1)
        utils = importlib.import_module("vllm_ascend.ops.triton.triton_utils")
        utils.init_device_properties_triton()
        # vllm-ascend asks which launches fit this SoC; nothing else of these modules is used.
        soc = types.SimpleNamespace(A2=object(), A5=object(), _310P=object())
        _module("torch_npu")
        for name in ("device.utils", "quantization.quant_type", "quantization.utils"):
            sys.modules[f"vllm_ascend.{name}"] = mock.MagicMock()
        _module("vllm_ascend.utils", AscendDeviceType=soc, get_ascend_device_type=lambda: soc.A2)
    if "fla" in checkouts:
        vars(sys.modules["fla.utils"]).update(
            get_multiprocessor_count=lambda index=0: CORES[1], input_guard=_unguarded,
            autotune_cache_kwargs={}, tensor_cache=lambda f: f, IS_GATHER_SUPPORTED=False,
            IS_NVIDIA=False, IS_NVIDIA_BLACKWELL=False, device_torch_lib=torch.npu,
        )  # fmt: skip
        index = importlib.import_module("fla.ops.utils.index")
        for name in ("prepare_chunk_indices", "prepare_chunk_offsets"):
            setattr(sys.modules["fla.ops.utils"], name, getattr(index, name))


def _unguarded(function=None, **options):
    """Return a decorator that changes nothing; works with and without options."""
    return function or (lambda function: function)


def _module(name: str, **contents) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="__path__" in contents)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)


def _version(option: str, checkout: pathlib.Path) -> str:
    """Return the version of an installed package, or else the commit of a checkout."""
    for found in checkout.glob(f"{PROJECTS[option][1]}-*.dist-info"):
        return found.name.removesuffix(".dist-info").partition("-")[2]
    said = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always"], capture_output=True, text=True
    )
    return said.stdout.strip()
