"""Argument checks of chunk_kda. `call` is a NamedTuple of the public function's arguments."""

from __future__ import annotations

import sys

from npu_ops.core import check
from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK_SIZES, TOKEN
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_common, check_like


def check_call(call) -> None:
    """Check the arguments of `chunk_kda`."""
    check.tensor("g", call.g)
    check.tensor("beta", call.beta)
    check_common(call, bias_by_key=True)
    check_like("g", call.g, call.v, (*call.v.shape[:3], call.q.shape[3]))
    check_like("beta", call.beta, call.v, call.v.shape[:3])
    if call.cu_seqlens_cpu is not None and call.cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu: got a value without cu_seqlens, needs both")
    _check_bound(call)
    check.one_of("chunk_size", call.chunk_size, (TOKEN, *CHUNK_SIZES))


def _check_bound(call) -> None:
    """Check lower_bound: only a gate that the function computes itself can have one."""
    if call.lower_bound is None:
        if call.safe_gate and call.use_gate_in_kernel:
            raise ValueError("lower_bound: got None with safe_gate=True, needs a number below 0")
        return
    if not call.use_gate_in_kernel:
        raise ValueError(f"lower_bound: got {call.lower_bound}, needs use_gate_in_kernel=True")
    check.number("lower_bound", call.lower_bound, -sys.float_info.max, 0, "a finite number below 0")
