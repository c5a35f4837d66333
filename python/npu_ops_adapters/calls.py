"""Replaces a function for the calls that npu-ops supports; other calls run the original."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch

import npu_ops
from npu_ops.core import env

DEVICES = ("cpu", "npu")


# Ops for which an unsupported call is an error with NPU_OPS_CONSISTENT: the framework's own
# function computes other bits.
RULES = ("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule")


def falling_through(ours: Callable, original: Callable, op: str = "") -> Callable:
    """Return a replacement for `original` that runs `ours` if possible, else the original.

    ours: takes the original's arguments. It returns a function without arguments that computes the
    result, or raises TypeError or ValueError if npu-ops does not support the call. With
    NPU_OPS_CONSISTENT and a gated delta rule, an unsupported call is an error.
    """

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_function(*args, **kwargs):
        try:
            call = ours(*args, **kwargs)
        except (TypeError, ValueError) as reason:
            if env.settings.consistent and op in RULES:
                raise inconsistent(op, reason) from reason
            return original(*args, **kwargs)
        return call()

    return npu_ops_function


def inconsistent(op: str, reason: Exception) -> RuntimeError:
    """Return the error for a call that npu-ops does not support under NPU_OPS_CONSISTENT."""
    return RuntimeError(
        f"NPU_OPS_CONSISTENT is set, but npu-ops does not support a call of {op}: {reason}"
    )


def check_device(x: torch.Tensor) -> None:
    """Raise ValueError unless x is on a device on which npu-ops replaces kernels."""
    if x.device.type not in DEVICES:
        raise ValueError(f"got device {x.device}, needs {' or '.join(DEVICES)}")


def token_by_token(*, gk=None, gv=None, **call):
    """Run the recurrent gated delta rule.

    With NPU_OPS_CONSISTENT=1, and neither gk nor gv, it calls `chunk_gated_delta_rule`, as training
    does; that function then runs token by token.

    Raises:
        RuntimeError: NPU_OPS_CONSISTENT is "chunks". In that mode a state must carry the tokens of
            its unfinished chunk, and the states of the frameworks that call this function do not.
    """
    if env.settings.consistent and gk is gv is None:
        if env.settings.consistent == "chunks":
            raise RuntimeError(
                "NPU_OPS_CONSISTENT=chunks, and this framework's states carry no unfinished chunk: "
                "generate with SGLang, or set NPU_OPS_CONSISTENT=1"
            )
        return npu_ops.chunk_gated_delta_rule(**call)
    return npu_ops.fused_recurrent_gated_delta_rule(gk=gk, gv=gv, **call)


def in_words_of(names: dict[str, str], function: Callable, *args, **kwargs):
    """Call `function(...)`; in its errors, rename arguments to the framework's names.

    names: npu-ops' name -> the framework's name.
    """
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        sentence = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise type(error)(sentence) from None
