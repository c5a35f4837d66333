"""A platform of verl for the CPU, for reference runs; verl only has platforms for GPUs and NPUs.

VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu
"""

from __future__ import annotations

import types

import torch
import torch.distributed.fsdp._init_utils as fsdp
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

DEVICE = types.SimpleNamespace(
    is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1,
    set_device=lambda device: None, synchronize=lambda *device: None, empty_cache=lambda: None,
    memory_allocated=lambda *device: 0, memory_reserved=lambda *device: 0,
    max_memory_allocated=lambda *device: 0, max_memory_reserved=lambda *device: 0,
    mem_get_info=lambda *device: (1 << 34, 1 << 34), ipc_collect=lambda: None,
    reset_peak_memory_stats=lambda *device: None, get_device_name=lambda *device: "cpu",
    manual_seed=torch.manual_seed, manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
)  # fmt: skip


def register() -> None:
    body = {name: lambda self, *args, **kwargs: None for name in PlatformBase.__abstractmethods__}
    named = {"device_name": "cpu", "vendor_name": "cpu", "device_module": DEVICE}
    body |= {name: property(lambda self, value=value: value) for name, value in named.items()}
    answers = {
        "is_available": True, "is_platform_available": True, "device_count": 1,
        "current_device": torch.device("cpu"), "communication_backend_name": "gloo",
        "visible_devices_envvar": "CPU_VISIBLE_DEVICES",
        "ray_resource_name": "NPU",  # verl's trainer counts NPUs or GPUs
        "get_device_capability": (None, None), "ray_noset_envvars": (), "rollout_env_vars": {},
    }  # fmt: skip
    body |= {
        name: lambda self, *args, value=value, **kwargs: value for name, value in answers.items()
    }
    PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformBase,), body))
    # verl asks for "cpu:gloo,<device>:<backend>", which would name the CPU twice. FSDP requires
    # modules on a GPU before it broadcasts them.
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, **kwargs: start("gloo", **kwargs)
    fsdp._check_module_states_for_sync_module_states = lambda *args, **kwargs: None


register()
