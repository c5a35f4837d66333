"""Adds the NPU to slime's accelerators, which are CUDA and MUSA."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import torch

from npu_ops.core import hardware
from npu_ops_adapters.patching import Patch

_HOME = "slime.utils.accelerator"
_FIELDS = ("factory", "is_available", "priority", "communication_backends")
# MindSpeed makes torch.cuda an alias of torch.npu, so slime's CUDA (priority 100) is available too.
_PRIORITY = 300


def patches() -> Iterable[Patch]:
    """Add an entry to slime's registry, from which slime chooses the accelerator of a process."""
    yield Patch(
        target=f"{_HOME}:_REGISTRY.npu",
        op="slime_accelerator",
        make=_register,
        why="slime supports only CUDA and MUSA",
        signatures=(),
        versions="slime 624b824a",
        remove_when="slime has an accelerator for NPUs",
        rebind=False,
        optional=True,
        why_not=_why_not,
    )


def _why_not(registered: Any) -> str | None:
    if registered is not None or importlib.util.find_spec(f"{_HOME}.npu"):
        return "slime has its own accelerator for NPUs"
    fields = tuple(f.name for f in dataclasses.fields(sys.modules[_HOME]._BackendRegistration))
    if fields != _FIELDS:
        return f"_BackendRegistration: got fields {fields}, needs {_FIELDS}"
    if not hasattr(_base(), "_module"):
        return "TorchAccelerator: has no _module, which says whose functions it calls"
    return None


def _base() -> type:
    return sys.modules[f"{_HOME}.torch_accelerator"].TorchAccelerator


def _register(_) -> Any:
    class NpuAccelerator(_base()):
        name = device_type = "npu"
        communication_backend_name = "hccl"
        visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"

        def _module(self):
            return torch.npu

    return sys.modules[_HOME]._BackendRegistration(
        factory=NpuAccelerator,
        is_available=hardware.is_npu,
        priority=_PRIORITY,
        communication_backends=("hccl",),
    )
