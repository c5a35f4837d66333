"""What the ops share: which SGLang this is, and functions of its that are replaced."""

from __future__ import annotations

import functools
import importlib.metadata

import torch
from packaging.version import Version

from npu_ops_adapters import serving
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import (  # noqa: F401  (the ops' files call them by this module)
    NotOursError,
    check_device,
    check_pool,
    committed,
    padded,
    read_slots,
    refuse,
    tokens_of_sequences,
    write_slots,
)
from npu_ops_adapters.sglang import hooks

VERSIONS = "SGLang 0.5.9 to 0.5.23"
_LAYERS = "sglang.srt.layers"
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"  # the variable that chooses the dtype of conv states


@functools.cache
def version() -> Version:
    """Of the SGLang that is installed; without one, the newest known."""
    try:
        return Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return Version("0.5.23")


def since(first: str) -> bool:
    """Whether this SGLang is `first` or newer; its patch releases count as it."""
    return version().release[:3] >= Version(first).release


def gated_delta_net() -> str:
    """The module of the backend that holds the functions of Gated Delta Net."""
    name = "linear.gdn_backend" if since("0.5.10") else "hybrid_linear_attn_backend"
    return f"{_LAYERS}.attention.{name}"


def rotary_embedding(name: str) -> str:
    """The module of a rotary embedding: a package from 0.5.10 on."""
    home = f"{_LAYERS}.rotary_embedding"
    return f"{home}.{name}" if since("0.5.10") else home


def on_npu() -> bool:
    """Whether torch has an NPU; asks no device."""
    return hasattr(torch, "npu")


def replaced(*arguments, **changes) -> Patch:
    """A patch of a function, by the arguments of `serving.replaced` after the framework."""
    settings = {
        "versions": VERSIONS,
        "remove_when": "SGLang lets the function be registered for a device it knows",
        "by": hooks.who_applies(),
    }
    return serving.replaced("SGLang", *arguments, **(settings | changes))


made = functools.partial(serving.made, "SGLang")
fell_back = functools.partial(serving.fell_back, "SGLang")
