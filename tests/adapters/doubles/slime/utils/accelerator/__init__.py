"""slime's registry of accelerators, from which a process takes its own."""

import dataclasses

import torch

from .torch_accelerator import TorchAccelerator

_REGISTRY = {}


@dataclasses.dataclass(frozen=True)
class _BackendRegistration:
    factory: object
    is_available: object
    priority: int
    communication_backends: tuple


class CUDAAccelerator(TorchAccelerator):
    name = device_type = "cuda"

    def _module(self):
        return torch.cuda


def initialize_accelerator():
    cuda = _BackendRegistration(CUDAAccelerator, lambda: True, 100, ("nccl",))
    found = [entry for entry in (cuda, *_REGISTRY.values()) if entry.is_available()]
    return max(found, key=lambda entry: entry.priority).factory()
