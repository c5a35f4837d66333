"""Shared by SGLang's adapters: SGLang's version, and patches of its functions."""

from __future__ import annotations

import functools
import importlib.metadata

import torch
from packaging.version import Version

from npu_ops_adapters import serving
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import (  # noqa: F401  (the ops' files use them through this module)
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
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"  # environment variable for the dtype of conv states


@functools.cache
def version() -> Version:
    """Return the version of the installed SGLang; if there is none, the newest known."""
    try:
        return Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return Version("0.5.23")


def since(first: str) -> bool:
    """Return whether this SGLang is `first` or newer; pre-releases count as the release."""
    return version().release[:3] >= Version(first).release


def gated_delta_net() -> str:
    """Return the module of the backend that holds the functions of Gated Delta Net."""
    name = "linear.gdn_backend" if since("0.5.10") else "hybrid_linear_attn_backend"
    return f"{_LAYERS}.attention.{name}"


def rotary_embedding(name: str) -> str:
    """Return the module of a rotary embedding; it is in a package from 0.5.10 on."""
    home = f"{_LAYERS}.rotary_embedding"
    return f"{home}.{name}" if since("0.5.10") else home


def on_npu() -> bool:
    """Return whether torch has an NPU backend; queries no device."""
    return hasattr(torch, "npu")


def replaced(*arguments, **changes) -> Patch:
    """Return a patch of a SGLang function; the arguments are those of `serving.replaced`."""
    settings = {
        "versions": VERSIONS,
        "remove_when": "SGLang accepts a registered function for this device",
        "by": hooks.who_applies(),
    }
    return serving.replaced("SGLang", *arguments, **(settings | changes))


made = functools.partial(serving.made, "SGLang")
fell_back = functools.partial(serving.fell_back, "SGLang")
