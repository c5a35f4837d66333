"""Implement SGLang's platform interface (0.5.18 and later) for a CPU."""

import torch
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

GIB = 1 << 30


class CpuPlatform(SRTPlatform):
    """An out-of-tree platform: SGLang's own CPU platform needs a package not published for CPUs."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self):
        return "torch_native"

    def get_dispatch_key_name(self):
        return "sglang_cpu"  # no class has forward_sglang_cpu, so forward_native runs

    def get_device_total_memory(self, device_id=0):
        return 16 * GIB

    def get_current_memory_usage(self, device=None):
        return 0.0

    def get_available_memory(self, device_id=0):
        return 12 * GIB, 16 * GIB

    def get_device(self, local_rank):
        return torch.device("cpu")

    def set_device(self, device):
        pass

    def get_device_name(self, device_id=0):
        return "cpu"

    def get_device_uuid(self, device_id=0):
        return "cpu-0"

    def empty_cache(self):
        pass

    def synchronize(self):
        pass

    def get_torch_distributed_backend_str(self):
        return "gloo"

    def is_pin_memory_available(self, device=None):
        return False

    def init_backend(self):
        pass
