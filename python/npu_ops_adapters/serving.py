"""Shared by sglang, vllm: calls that are ours in part, and the slots of state pools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from npu_ops.core import check, env, log, make
from npu_ops_adapters.calls import DEVICES, inconsistent
from npu_ops_adapters.patching import Names, Patch, parameters


def replaced(
    framework: str, target: str, op: str, ours: Callable, why: str, *signatures: Names | None,
    **settings,
) -> Patch:  # fmt: skip
    """A patch of a function whose calls are ours in part.

    ours: as in `made`; where it raises, the framework's own function runs, and a sentence is logged
        once.
    signatures: the framework's, of all known versions; by default the one that ours has.
    settings: the other fields of Patch.
    """
    return Patch(
        target=target, op=op, make=functools.partial(made, framework, ours, target), why=why,
        signatures=signatures or (parameters(ours),), **settings,
    )  # fmt: skip


def made(framework: str, ours: Callable, target: str, original: Callable) -> Callable:
    """`ours`, and `original` for what is not ours.

    ours: takes the framework's arguments, and raises TypeError or ValueError before it writes
        anything where a call is not ours.
    """

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_function(*args, **kwargs):
        try:
            return ours(*args, **kwargs)
        except (TypeError, ValueError) as reason:
            fell_back(framework, target, reason)
        return original(*args, **kwargs)

    return npu_ops_function


def fell_back(framework: str, name: str, reason: Exception) -> None:
    """Say once that the framework's own function runs, unless it is at home on the device.

    Raises:
        RuntimeError: with NPU_OPS_CONSISTENT: its bits are not the trainer's.
    """
    if env.settings.consistent:
        raise inconsistent(name, reason) from reason
    if not isinstance(reason, NotOursError):
        log.once(f"{framework}'s own {name.rpartition(':')[2]} runs: {reason}")


class NotOursError(ValueError):
    """A call that was never meant to be ours: another device, or inside torch.compile."""


@contextlib.contextmanager
def committed() -> Iterator[None]:
    """A state is written, so the framework cannot start again: what is wrong is an error.

    Raises:
        RuntimeError: for a TypeError or a ValueError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"npu-ops, halfway through a layer: {error}") from error


def check_device(x: torch.Tensor, devices: Names = DEVICES) -> None:
    """Raise NotOursError where the framework's own kernels are at home."""
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


def check_pool(name: str, pool: torch.Tensor, x: torch.Tensor, setting: str) -> None:
    """With NPU_OPS_CONSISTENT what waits in a pool is not rounded: training has no pool.

    Raises:
        ValueError: the pool's dtype does not hold x's numbers; setting is what chooses it.
    """
    if env.settings.consistent and torch.promote_types(pool.dtype, x.dtype) != pool.dtype:
        raise ValueError(
            f"{name}: got {check.short(pool.dtype)} with NPU_OPS_CONSISTENT, needs x's "
            f"{check.short(x.dtype)}: set {setting}"
        )
