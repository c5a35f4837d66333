"""Shared by sglang, vllm: replaces functions for supported calls; reads and writes state pools."""

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
    """Return a patch of a function, for the calls that npu-ops supports.

    ours: takes the call's arguments, as in `made`. If it raises, the framework's own function
        runs, and the reason is logged once.
    signatures: the framework's, of all known versions; the default is the signature of `ours`.
    settings: other fields of Patch.
    """
    return Patch(
        target=target, op=op, make=functools.partial(made, framework, ours, target), why=why,
        signatures=signatures or (parameters(ours),), **settings,
    )  # fmt: skip


def made(framework: str, ours: Callable, target: str, original: Callable) -> Callable:
    """Return a function that runs `ours` if it supports the call, else `original`.

    ours: takes the framework's arguments. For an unsupported call it raises TypeError or ValueError
    before it writes anything.
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
    """Log once that the framework's own function runs, unless that is intended (NotOursError).

    Raises:
        RuntimeError: NPU_OPS_CONSISTENT is set: the framework's own function gives other bits than
            the trainer.
    """
    if env.settings.consistent:
        raise inconsistent(name, reason) from reason
    if not isinstance(reason, NotOursError):
        log.once(f"{framework}'s own {name.rpartition(':')[2]} runs: {reason}")


class NotOursError(ValueError):
    """A call that npu-ops leaves to the framework on purpose, e.g. on another device.

    Its reason is not logged.
    """


@contextlib.contextmanager
def committed() -> Iterator[None]:
    """Make errors in a block fatal: a state is written, so the framework's function must not run.

    Raises:
        RuntimeError: the block raised a TypeError or a ValueError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(
            f"npu-ops: error halfway through a layer, after it wrote a state: {error}"
        ) from error


def check_device(x: torch.Tensor, devices: Names = DEVICES) -> None:
    """Raise NotOursError unless x is a tensor on one of `devices`."""
    if not isinstance(x, torch.Tensor) or x.device.type not in devices:
        raise NotOursError(f"needs a tensor on {' or '.join(devices)}")


def refuse(**given) -> None:
    """Raise ValueError unless all of these arguments, which npu-ops lacks, are None or False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {type(value).__name__}, needs None")


def read_slots(pool: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return copies of the slots `indices` of a pool; an index of -1 (padding) gets slot 0."""
    return pool[indices.clamp(min=0).long()]


def write_slots(pool: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to the slots, skipping padding (index -1), without waiting for the device.

    A padded row repeats the write of the first real row. If all rows are padding, slot 0 is
    overwritten with its own value.
    """
    if not indices.numel():
        return
    real = indices >= 0
    first = real.int().argmax()
    rows = torch.where(real, make.counted(real.numel(), device=real.device), first)
    slots = indices[rows].clamp(min=0).long()
    values = values[rows].to(pool.dtype)
    # real.any(), because `real[first]` would wait for the device.
    pool[slots] = torch.where(real.any(), values, pool[slots])


def tokens_of_sequences(x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return x `[T, ...]` without the padding after the last sequence, and T with padding.

    starts: cu_seqlens. If they are on a device, their values are not read, and x keeps its padding.
    """
    tokens = x.shape[0]
    return (x[: int(starts[-1])], tokens) if starts.device.type == "cpu" else (x, tokens)


def padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Append zeros to `[T, ...]` up to `tokens` rows."""
    missing = tokens - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def check_pool(name: str, pool: torch.Tensor, x: torch.Tensor, setting: str) -> None:
    """Raise ValueError if NPU_OPS_CONSISTENT is set and the pool's dtype would round x.

    Training has no pool, so it does not round there. setting: the option that selects the dtype.
    """
    if env.settings.consistent and torch.promote_types(pool.dtype, x.dtype) != pool.dtype:
        raise ValueError(
            f"{name}: got {check.short(pool.dtype)} with NPU_OPS_CONSISTENT, needs x's "
            f"{check.short(x.dtype)}: set {setting}"
        )
