"""Restores npu-ops' functions after verl's own NPU patches, which an FSDP engine applies at start.

verl replaces functions of transformers, and would overwrite the rope, the norms and the SwiGLU that
npu-ops has patched. verl still replaces the experts with its own function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch the function with which verl applies all of its NPU patches."""
    yield Patch(
        target="verl.models.transformers.npu_patch:apply_npu_patches",
        op="verl_npu_patches",
        make=_replace,
        why="it overwrites functions of npu-ops",
        signatures=((),),
        versions="verl 0.9.1",
        remove_when="verl checks whether it may replace a function",
    )


def _replace(original: Callable) -> Callable:
    def npu_ops_apply_npu_patches():
        with patching.protect():
            return original()

    return npu_ops_apply_npu_patches
