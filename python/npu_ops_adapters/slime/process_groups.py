"""slime's process groups under newer torch, whose collectives have new names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from npu_ops_adapters.patching import Patch

_MODULE = "slime.utils.reloadable_process_group"
_CLASS = "ReloadableProcessGroup"
_NEW = ("all_gather_single", "all_to_all_single", "reduce_scatter_single")


def patches() -> Iterable[Patch]:
    """Methods of torch's groups that slime's class does not pass on to the group that it holds."""
    there = vars(getattr(sys.modules.get(_MODULE), _CLASS, object))
    for name in _NEW:
        if hasattr(torch.distributed.ProcessGroup, name) and name not in there:
            yield Patch(
                target=f"{_MODULE}:{_CLASS}.{name}",
                op="slime_process_groups",
                make=_pass_on(name),
                why="torch 2.13 calls it, and slime's group has no backend of its own",
                signatures=(),
                versions="slime v0.2.2 and 624b824a with torch 2.13",
                remove_when=f"slime passes {name} on",
                optional=True,
                why_not=_why_not,
            )


def _why_not(_) -> str | None:
    if hasattr(getattr(sys.modules[_MODULE], _CLASS), "_fwd"):
        return None
    return f"{_CLASS} has no _fwd, by which it passes calls on"


def _pass_on(name: str) -> Callable[[Any], Any]:
    def make(_):
        return functools.partialmethod(getattr(sys.modules[_MODULE], _CLASS)._fwd, name)

    return make
