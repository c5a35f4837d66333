"""With NPU_OPS_CONSISTENT, a vision tower's position embedding has the bits of the servers.

transformers interpolates in fp32 on the device, and version 4 also rounds the weights. SGLang and
vLLM with npu-ops interpolate in fp64 and round once. With this patch transformers does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from npu_ops.core import check, env
from npu_ops_adapters import vision_tower
from npu_ops_adapters.calls import check_device, falling_through
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models

_INTERPOLATION = "get_vision_interpolation_indices_and_weights"
_BILINEAR = "get_vision_bilinear_indices_and_weights"  # before version 5.11
_METHOD = "fast_pos_embed_interpolate"  # in version 4
_OP, _WHY = "vision_position", "inference servers with npu-ops interpolate in fp64"


def patches() -> Iterable[Patch]:
    """Patch the function that models call: its name depends on the version."""
    if not env.settings.consistent:
        return
    for model in models.imported(models.vision()):
        if models.having((model,), _INTERPOLATION):
            yield from models.replaced((model,), _INTERPOLATION, _OP, interpolation)
        elif models.having((model,), _BILINEAR):
            yield from models.replaced((model,), _BILINEAR, _OP, bilinear)
        else:
            yield from _methods(model)


def _methods(model: str) -> Iterable[Patch]:
    for name in models.classes(model, lambda cls: _METHOD in vars(cls)):
        target = f"{models.home(model)}:{name}.{_METHOD}"
        make = functools.partial(falling_through, method, op=_OP)
        yield models.patch(target, _OP, make, (("self", "grid_thw"),), why=_WHY)


def interpolation(
    grid_thw, num_grid_per_side, mode="bilinear", align_corners=False, spatial_merge_size=1,
    padding="border", kwargs=None,
) -> Callable:  # fmt: skip
    """Return a function that returns rows of the table and their weights, both `[T, 4]`."""
    check.one_of("mode", mode, ("bilinear",))
    check.one_of("align_corners", align_corners, (True,))
    check.one_of("padding", padding, ("border",))
    _check_not_given(kwargs, "interp_indices", "interp_weights")
    call = bilinear(grid_thw, num_grid_per_side, spatial_merge_size)
    return lambda: tuple(x.t().contiguous() for x in call())


def bilinear(grid_thw, num_grid_per_side, spatial_merge_size, kwargs=None) -> Callable:
    """Return a function that returns rows of the table and their weights, both `[4, T]`."""
    check_device(grid_thw)
    _check_not_given(kwargs, "bilinear_indices", "bilinear_weights")

    def call():
        found = vision_tower.corners(grid_thw.tolist(), num_grid_per_side, spatial_merge_size)
        return tuple(x.to(grid_thw.device) for x in found)

    return call


def method(self, grid_thw) -> Callable:
    """Return a function that returns the position embedding `[T, D]` of the tower `self`."""
    check_device(grid_thw)
    return functools.partial(vision_tower.position_embedding, self, grid_thw.tolist())


def _check_not_given(kwargs, *names: str) -> None:
    """Raise ValueError if the caller has computed one of these tensors itself."""
    for name in names:
        if (kwargs or {}).get(name) is not None:
            raise ValueError(f"{name}: got a value from the caller, needs None")
