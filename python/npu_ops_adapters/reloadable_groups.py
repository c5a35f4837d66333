"""Adds collectives, which torch 2.13 has renamed, to the process groups of slime and Relax.

Shared by `slime.process_groups` and `relax.process_groups`. Relax has a copy of slime's class
`ReloadableProcessGroup`, which forwards calls to a group that it holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from npu_ops_adapters.patching import Patch

_CLASS = "ReloadableProcessGroup"
_NEW = ("all_gather_single", "all_to_all_single", "reduce_scatter_single")


def patches(module: str, op: str, versions: str) -> Iterable[Patch]:
    """Add methods of torch's ProcessGroup that the class does not forward to the group it holds."""
    there = vars(getattr(sys.modules.get(module), _CLASS, object))
    for name in _NEW:
        if hasattr(torch.distributed.ProcessGroup, name) and name not in there:
            yield Patch(
                target=f"{module}:{_CLASS}.{name}",
                op=op,
                make=functools.partial(_pass_on, module, name),
                why=(
                    "torch 2.13 calls this method, and the trainer's group has no backend of "
                    "its own"
                ),
                signatures=(),
                versions=f"{versions} with torch 2.13",
                remove_when=f"the trainer forwards {name}",
                optional=True,
                why_not=functools.partial(_why_not, module),
            )


def _why_not(module: str, _) -> str | None:
    if hasattr(getattr(sys.modules[module], _CLASS), "_fwd"):
        return None
    return f"{_CLASS} has no _fwd, the method that forwards calls"


def _pass_on(module: str, name: str, _) -> Callable[..., Any]:
    return functools.partialmethod(getattr(sys.modules[module], _CLASS)._fwd, name)
