"""What verl sets over functions of transformers on NPUs, as an engine of FSDP starts.

It would also set its rope and its norms over those of npu-ops, which are already in force. Ours
stay; what npu-ops has no operator for (SwiGLU, experts) is verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch

TARGET = "verl.models.transformers.npu_patch:apply_npu_patches"


def patches() -> Iterable[Patch]:
    """The function that sets them all."""
    yield Patch(
        target=TARGET,
        op="verl_npu_patches",
        make=_replace,
        why="it sets functions over those of npu-ops",
        signatures=((),),
        versions="verl 0.9.1",
        remove_when="verl asks whether a function is its to replace",
    )


def _replace(original: Callable) -> Callable:
    def npu_ops_apply_npu_patches():
        with patching.kept():
            return original()

    return npu_ops_apply_npu_patches
