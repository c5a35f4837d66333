"""The gated delta rule token by token: a function, which fla asks no backend for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.fused_recurrent_gated_delta_rule import (
    check_cu_seqlens,
    check_flags,
    check_heads,
    check_like,
    check_state,
)
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.fla.chunk_gated_delta_rule import as_fp32
from npu_ops_adapters.patching import Patch

_HEAD = (
    *("q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state"),
    "use_qk_l2norm_in_kernel",
)
_FLAGS = (
    *("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel"),
    *("allow_neg_eigval", "state_v_first", "cu_seqlens", "kwargs"),
)


def patches() -> Iterable[Patch]:
    """`fused_recurrent_gated_delta_rule`, also called `fused_recurrent_gdn`."""
    yield functions.replaced(
        ("fla.ops.gated_delta_rule.fused_recurrent",),
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        ours,
        (*_HEAD, *_FLAGS),
    )


def ours(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None, *, transpose_state_layout=None,
) -> Callable:  # fmt: skip
    """The call of ours that is this call of fla's; it has a gradient, which fla's has not.

    fla computes in fp32 whatever the dtypes are, so where q, k and v have several, we do too; the
    output is of v's dtype.
    """
    v_first = functions.v_first(state_v_first, transpose_state_layout)
    A_log, dt_bias = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
    state = as_fp32(initial_state)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.floating(name, x)
    dtype = v.dtype
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = (x.float() for x in (q, k, v))
    check_heads(q, k, v)
    check_device(q)
    check_flags(
        g, beta, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v
    )
    tokens, (keys, values) = v.shape[:3], (q.shape[3], v.shape[3])
    check_like("g", g, v, tokens)
    check_like("gk", gk, v, (*tokens, keys))
    check_like("gv", gv, v, (*tokens, values))
    check_like("beta", beta, v, tokens, (*tokens, values))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, v)
    check_state(state, v, keys, v_first, cu_seqlens)
    call = functools.partial(
        npu_ops.fused_recurrent_gated_delta_rule, q, k, v, g, gk, gv, beta, scale, state,
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, v_first, cu_seqlens,
    )  # fmt: skip
    return call if dtype == v.dtype else functools.partial(_rounded, call, dtype)


def _rounded(call: Callable, dtype: torch.dtype):
    o, state = call()
    return o.to(dtype), state
