"""Functions of fla that are replaced: each has a module, which changed with 0.6, and importers."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from npu_ops_adapters.calls import falling_through
from npu_ops_adapters.patching import Names, Patch

VERSIONS = "fla 0.5.2 and 0.6"
WHY = "fla's needs a Triton that runs where the tensors are, and on NPUs launches more kernels"


def replaced(modules: Names, name: str, op: str, ours: Callable, *signatures: Names) -> Patch:
    """A patch of `name` in the first of `modules` that is imported.

    ours: takes fla's arguments and returns a call, or raises TypeError or ValueError for what is
        not ours.
    """
    module = next((module for module in modules if module in sys.modules), modules[-1])
    return Patch(
        target=f"{module}:{name}",
        op=op,
        make=functools.partial(falling_through, ours),
        why=WHY,
        signatures=signatures,
        versions=VERSIONS,
        remove_when="fla lets a backend be registered for it, in all versions in use",
    )


def refuse(**given) -> None:
    """Raise ValueError for an argument of fla's that we have no counterpart of, unless unused."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {type(value).__name__}, needs None")


def converted(call: NamedTuple, transpose_state_layout: bool | None):
    """A call of fla's delta rule as one of ours, by the arguments' names.

    What no flag reads is left out. A state of half precision becomes fp32; its gradient comes back
    in its own dtype. transpose_state_layout is what fla once called state_v_first.
    """
    if not call.use_gate_in_kernel:
        call = call._replace(A_log=None, dt_bias=None)
    state, halves = call.initial_state, (torch.float16, torch.bfloat16)
    if isinstance(state, torch.Tensor) and state.dtype in halves:
        call = call._replace(initial_state=state.float())
    return call._replace(state_v_first=_v_first(call.state_v_first, transpose_state_layout))


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout: got one with state_v_first, needs one of them")
    warnings.warn(
        "transpose_state_layout is deprecated, and now called state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout
