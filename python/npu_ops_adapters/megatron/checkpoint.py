"""Lets activation checkpointing take lists of tensors, such as Qwen3-VL's deepstack features.

Megatron's checkpoint handles only tensors: a list among the arguments is an error, and a list among
the results has no gradient. This patch passes the elements of lists one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Replace Megatron's `tensor_parallel.checkpoint`."""
    yield Patch(
        target="megatron.core.tensor_parallel.random:checkpoint",
        op="checkpoint",
        make=_replace,
        why="autograd cannot save a list of tensors, and gives a returned list no gradient",
        signatures=(("function", "distribute_saved_activations", "args"),),
        versions="Megatron-Core 0.12 to 0.19 and main",
        remove_when="Megatron-Bridge passes the deepstack features one by one",
    )


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_checkpoint(function, distribute_saved_activations, *args):
        values, lengths = _flat(args)
        returned = []  # nesting of the results

        def run(*values):
            out = function(*_nested(values, lengths))
            if not isinstance(out, tuple):
                return out
            out, nesting = _flat(out)
            returned[:] = [nesting]
            return out

        out = original(run, distribute_saved_activations, *values)
        return _nested(out, *returned) if returned else out

    return npu_ops_checkpoint


def _flat(values: Sequence) -> tuple[tuple, list]:
    """Flatten lists among the values; also return (type, length) of each list, None for others."""
    flat, nesting = [], []
    for value in values:
        is_list = isinstance(value, (list, tuple)) and any(map(torch.is_tensor, value))
        flat += value if is_list else [value]
        nesting.append((type(value), len(value)) if is_list else None)
    return tuple(flat), nesting


def _nested(flat: Sequence, nesting: list) -> tuple[Any, ...]:
    values = iter(flat)
    return tuple(
        next(values) if part is None else part[0]([next(values) for _ in range(part[1])])
        for part in nesting
    )
