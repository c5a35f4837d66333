"""Shared by fla's adapters: make a patch of a function, and convert fla's arguments."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import distributed
from torch.nn import functional

from npu_ops.core import check
from npu_ops_adapters.calls import falling_through
from npu_ops_adapters.patching import Names, Patch, parameters

VERSIONS = "fla 0.5.2 and 0.6"
WHY = (
    "fla's function needs a Triton driver for the tensors' device, and launches more kernels "
    "on NPUs"
)


def replaced(modules: Names, name: str, ours: Callable, *signatures: Names, op: str = "") -> Patch:
    """Return a patch of `name` in the first of `modules` that is imported.

    ours: takes fla's arguments and returns a function that computes the result, or raises TypeError
    or ValueError if npu-ops does not support the call.
    signatures: parameter names of fla's function, a tuple per known version; default: those of
    `ours`.
    op: npu-ops' name of the op; default: `name`.
    """
    op = op or name
    module = next((module for module in modules if module in sys.modules), modules[-1])
    return Patch(
        target=f"{module}:{name}",
        op=op,
        make=functools.partial(falling_through, ours, op=op),
        why=WHY,
        signatures=signatures or (parameters(ours),),
        versions=VERSIONS,
        remove_when="all fla versions in use accept a backend for this function",
    )


def refuse(**given) -> None:
    """Raise ValueError if one of these arguments of fla, which npu-ops does not support, is used.

    None and False count as unused.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: got {type(value).__name__}, needs None")


def shared(cp_context, x, initial_state, output_final_state: bool) -> dict:
    """Convert fla's context of ranks that share packed sequences to cu_seqlens and cp_group.

    fla's context has two things:

    - the starts of sequences in this rank's contiguous range of tokens;
    - how many tokens of the range's first sequence are on earlier ranks.

    The returned cu_seqlens counts from rank 0's first token: `[0, start of the range's first
    sequence, starts in the range]`. All earlier sequences count as one, because npu-ops does not
    need their starts.

    Args:
        x: `[1, T, ...]`, this rank's tokens. With fla every rank has T tokens.

    Returns:
        {"cu_seqlens": ..., "cp_group": ...}

    Raises:
        ValueError: the context has another form, or fla does not support such a call.
    """
    layout = getattr(cp_context, "layout", "contiguous")
    if layout != "contiguous":
        raise ValueError(
            f"cp_context: got layout {layout!r}, which splits all tokens as one sequence, needs "
            "'contiguous'"
        )
    needed = ("group", "cu_seqlens", "pre_num_conv_tokens")
    missing = [name for name in needed if getattr(cp_context, name, None) is None]
    if missing:
        raise ValueError(f"cp_context: got None for {missing[0]}, needs a value")
    if getattr(cp_context, "pre_num_ranks_dev", None) is not None:
        raise ValueError(
            "cp_context: got numbers that change on the device (pre_num_ranks_dev), needs "
            "fixed numbers"
        )
    check.alone("cp_context", initial_state=initial_state)
    if output_final_state:
        raise ValueError("output_final_state: got True with cp_context, needs False")
    here = getattr(cp_context, "cu_seqlens_cpu", None)
    if x.dim() < 3 or x.shape[0] != 1 or (here is not None and int(here[-1]) != x.shape[1]):
        raise ValueError(
            f"cp_context: got tokens of shape {list(x.shape)}, needs [1, T, ...], T in all of its "
            "sequences"
        )
    begin = distributed.get_rank(cp_context.group) * x.shape[1]
    starts = functional.pad(cp_context.cu_seqlens + begin, (1, 0))
    starts[1] -= cp_context.pre_num_conv_tokens
    return {"cu_seqlens": starts, "cp_group": cp_context.group}


def converted(call: NamedTuple, transpose_state_layout: bool | None):
    """Convert a call of fla's delta rule to one of npu-ops, both as NamedTuples.

    - A_log and dt_bias are dropped unless use_gate_in_kernel is set.
    - A half-precision state is converted to fp32; its gradient keeps the state's dtype.
    - transpose_state_layout, fla's former name for state_v_first, is renamed.
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
        raise ValueError(
            "transpose_state_layout: got a value with state_v_first, needs only one of the two"
        )
    warnings.warn(
        "transpose_state_layout is deprecated, use state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout
