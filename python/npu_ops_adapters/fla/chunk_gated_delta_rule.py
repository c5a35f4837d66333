"""The gated delta rule by chunks: a backend in fla's registry, before all of fla's own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.chunk_gated_delta_rule.op import CHUNK_SIZES
from npu_ops.ops.fused_recurrent_gated_delta_rule import (
    check_cu_seqlens,
    check_flags,
    check_heads,
    check_like,
    check_state,
)
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch

_OPERATION = "gated_delta_rule"
_REGISTRIES = "_operation_registries"  # of fla.backends, from 0.6 on


def patches() -> Iterable[Patch]:
    """An entry of what the registry holds, by the backend's name: fla cannot take one out."""
    yield Patch(
        target=f"{_registry()}._backends.npu_ops",
        op="chunk_gated_delta_rule",
        make=_backend,
        why="one kernel forward in place of six; and where Triton has no driver, it computes",
        signatures=(),
        versions=functions.VERSIONS,
        remove_when="fla takes backends from entry points",
        rebind=False,
        optional=True,
    )


def _registry() -> str:
    """Where it is; before fla's own backends are in it, where it was before 0.6."""
    registries = vars(sys.modules.get("fla.backends", object)).get(_REGISTRIES, {})
    if _OPERATION in registries:
        return f"fla.backends:{_REGISTRIES}.{_OPERATION}"
    return f"fla.ops.{_OPERATION}.backends:gdr_registry"


def _backend(original: None):
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise ValueError("FLA_DISABLE_BACKEND_DISPATCH=1: fla asks no backend")
    home = sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]

    class NpuOps(home.BaseBackend):
        """Below fla's, which are 0 and more: the lowest is asked first."""

        backend_type = "npu_ops"
        priority = -1

        def chunk_gated_delta_rule_verifier(self, *args, **kwargs):
            try:
                ours(*args, **kwargs)
            except (TypeError, ValueError) as reason:
                return False, str(reason)
            return True, None

        def chunk_gated_delta_rule(self, *args, **kwargs):
            return ours(*args, **kwargs)()

    return NpuOps()


def ours(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, *, cu_seqlens_cpu=None, chunk_indices=None,
    cp_context=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64,
    transpose_state_layout=None,
) -> Callable:  # fmt: skip
    """The call of ours that is this call of fla's.

    A_log and dt_bias may be given where they are not used. fla computes with an initial state of
    any float dtype in fp32, so a half is converted. Positions differ between versions after
    cu_seqlens, and how chunks lie in memory is fla's own affair.
    """
    functions.refuse(cp_context=cp_context)
    v_first = functions.v_first(state_v_first, transpose_state_layout)
    A_log, dt_bias = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
    state = as_fp32(initial_state)
    check_heads(q, k, v)
    check_device(q)
    check.one_of("chunk_size", chunk_size, CHUNK_SIZES)
    for name, x in (("g", g), ("beta", beta)):
        check.tensor(name, x)
        check_like(name, x, v, v.shape[:3])
    check_flags(
        g, beta, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v
    )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, v)
    check_state(state, v, q.shape[3], v_first, cu_seqlens)
    return functools.partial(
        npu_ops.chunk_gated_delta_rule, q, k, v, g, beta, scale, state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v_first, cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size,
    )  # fmt: skip


def as_fp32(state: torch.Tensor | None) -> torch.Tensor | None:
    """A state of half precision in fp32; its gradient comes back in its own dtype."""
    halves = (torch.float16, torch.bfloat16)
    return state.float() if isinstance(state, torch.Tensor) and state.dtype in halves else state
