"""What the ops share: which SGLang this is, and functions of its that are replaced."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator

import torch
from packaging.version import Version

from npu_ops.core import env, log, make
from npu_ops_adapters.calls import inconsistent
from npu_ops_adapters.patching import Names, Patch
from npu_ops_adapters.sglang import hooks

VERSIONS = "SGLang 0.5.9 to 0.5.23"
DEVICES = ("cpu", "npu")
_LAYERS = "sglang.srt.layers"


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


def replaced(
    target: str, op: str, ours: Callable, why: str, *signatures: Names | None, **changes
) -> Patch:
    """A patch of a function.

    ours: takes SGLang's arguments, and raises TypeError or ValueError before it writes anything
        where a call is not ours; SGLang's own function then runs, and a sentence is logged once.
    """
    return Patch(
        target=target,
        op=op,
        make=functools.partial(made, ours, target),
        why=why,
        signatures=signatures,
        versions=VERSIONS,
        remove_when="SGLang lets the function be registered for a device it knows",
        **({"by": hooks.who_applies()} | changes),
    )


def made(ours: Callable, target: str, original: Callable) -> Callable:
    """`ours`, and `original` for what is not ours."""

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_function(*args, **kwargs):
        try:
            return ours(*args, **kwargs)
        except (TypeError, ValueError) as reason:
            fell_back(target, reason)
        return original(*args, **kwargs)

    return npu_ops_function


def fell_back(name: str, reason: Exception) -> None:
    """Say once that SGLang's own function runs, unless it is at home on the device.

    Raises:
        RuntimeError: with NPU_OPS_CONSISTENT: its bits are not the trainer's.
    """
    if env.settings.consistent:
        raise inconsistent(name, reason) from reason
    if not isinstance(reason, NotOursError):
        log.once(f"SGLang's own {name.rpartition(':')[2]} runs: {reason}")


class NotOursError(ValueError):
    """A call that was never meant to be ours: another device, or inside torch.compile."""


@contextlib.contextmanager
def committed() -> Iterator[None]:
    """A state is written, so SGLang's own function cannot start again: what is wrong is an error.

    Raises:
        RuntimeError: for a TypeError or a ValueError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"npu-ops, halfway through a layer: {error}") from error


def check_device(x: torch.Tensor, devices: Names = DEVICES) -> None:
    """Raise NotOursError where SGLang's own kernels are at home."""
    if not isinstance(x, torch.Tensor) or x.device.type not in devices:
        raise NotOursError(f"needs a tensor on {' or '.join(devices)}")


def refuse(**given) -> None:
    """Raise ValueError for an argument that we have no counterpart of, unless unused."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {type(value).__name__}, needs None")


def read_slots(pool: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copies of the slots; those of padding, which have the index -1, are slot 0's."""
    return pool[indices.clamp(min=0).long()]


def write_slots(pool: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Write the slots and nothing for padding, without asking the device which is padding.

    A padded row repeats the first that is none; if all are padding, slot 0 gets what it has.
    """
    if not indices.numel():
        return
    real = indices >= 0
    first = real.int().argmax()
    rows = torch.where(real, make.counted(real.numel(), device=real.device), first)
    slots = indices[rows].clamp(min=0).long()
    values = values[rows].to(pool.dtype)
    pool[slots] = torch.where(real.any(), values, pool[slots])  # a `real[first]` would wait


def tokens_of_sequences(x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`[T, ...]` without padding behind the last sequence, as far as that is known; and T."""
    tokens = x.shape[0]
    return (x[: int(starts[-1])], tokens) if starts.device.type == "cpu" else (x, tokens)


def padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[T, ...]` with zeros behind, so that there are `tokens`."""
    missing = tokens - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
