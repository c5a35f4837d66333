"""The models whose modules are patched. Each has copies of its own of all functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.calls import falling_through
from npu_ops_adapters.patching import Names, Patch, parameters

TEXT = ("qwen2", "qwen3", "qwen3_moe")
QWEN2_VL = ("qwen2_vl", "qwen2_5_vl")
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
VISION = (*QWEN2_VL, *QWEN3_VL, *QWEN3_5)
DELTA_NET = ("qwen3_next", *QWEN3_5)

VERSIONS = "transformers 4.57, 5.10 and 5.23"
WHY = "it is several kernels, each of which reads and writes everything"


def replaced(
    models: Names, name: str, op: str, ours: Callable, *signatures: Names | None
) -> Iterable[Patch]:
    """A patch of `name` in each model's module.

    ours: takes the function's arguments and returns a call, or raises TypeError or ValueError for
        what is not ours.
    signatures: transformers', of all known versions; by default the one that ours has.
    """
    for model in models:
        make = functools.partial(falling_through, ours, op=op)
        yield patch(f"{home(model)}:{name}", op, make, signatures or (parameters(ours),))


def patch(target: str, op: str, make: Callable, signatures, **changes) -> Patch:
    """A patch with what all of them have in common."""
    settings = {
        "why": WHY,
        "remove_when": "transformers calls an operator here that has an NPU kernel",
    }
    return Patch(
        target=target,
        op=op,
        make=make,
        signatures=signatures,
        versions=VERSIONS,
        **(settings | changes),
    )


def home(model: str) -> str:
    """The module of a model."""
    return f"transformers.models.{model}.modeling_{model}"


def delta_net_classes(kind: str) -> dict[str, str]:
    """The class of a kind, e.g. "RMSNorm", in each model with Gated Delta Net."""
    begin = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
    return {model: f"{name}{kind}" for model, name in zip(DELTA_NET, begin, strict=True)}


def having(models: Names, name: str) -> Names:
    """Those of the models that are imported and have `name`, which some versions have not."""
    return tuple(model for model in models if name in vars(sys.modules.get(home(model), object)))
