"""Replaces fla's gated delta rule token by token, a function for which fla has no backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.core.signature import call_of
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_call
from npu_ops_adapters.calls import check_device, token_by_token
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch

_Call = call_of(npu_ops.fused_recurrent_gated_delta_rule)
_HEAD = (
    *("q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state"),
    "use_qk_l2norm_in_kernel",
)
_FLAGS = (
    *("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel"),
    *("allow_neg_eigval", "state_v_first", "cu_seqlens", "kwargs"),
)


def patches() -> Iterable[Patch]:
    """Patch `fused_recurrent_gated_delta_rule`, also called `fused_recurrent_gdn`."""
    yield functions.replaced(
        ("fla.ops.gated_delta_rule.fused_recurrent",),
        "fused_recurrent_gated_delta_rule",
        ours,
        (*_HEAD, *_FLAGS),
    )


def ours(*args, transpose_state_layout=None, **options) -> Callable:
    """Return the npu-ops call for this call of fla. It has a gradient, unlike fla's.

    fla computes in fp32 for all dtypes, so q, k and v of different dtypes are converted to fp32.
    The output has v's dtype.
    """
    call = functions.converted(_Call(*args, **options), transpose_state_layout)
    for name in ("q", "k", "v"):
        check.floating(name, getattr(call, name))
    dtype = call.v.dtype
    if not call.q.dtype == call.k.dtype == dtype:
        call = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
    check_call(call)
    check_device(call.q)
    ours = functools.partial(token_by_token, **call._asdict())
    return ours if dtype == call.v.dtype else functools.partial(_rounded, ours, dtype)


def _rounded(call: Callable, dtype: torch.dtype):
    o, state = call()
    return o.to(dtype), state
