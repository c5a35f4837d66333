"""Replaces fla's Kimi Delta Attention, by chunks and token by token; both have a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_kda.arguments import check_call
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch

_Call = call_of(npu_ops.chunk_kda)
_TOKENS = ("q", "k", "v", "g", "beta")
_STATES = ("scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_FLAGS = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
_CHUNK = (*_TOKENS, *_STATES, *_FLAGS, "safe_gate", "lower_bound")
_STARTS = (
    *("disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens"),
    *("cu_seqlens_cpu", "cp_context"),
)
_RECURRENT = (*_TOKENS, "A_log", "dt_bias", *_STATES, *_FLAGS, "lower_bound")


def patches() -> Iterable[Patch]:
    """Patch `chunk_kda` and `fused_recurrent_kda`."""
    yield functions.replaced(
        ("fla.ops.kda.chunk",),
        "chunk_kda",
        by_chunks,
        (*_CHUNK, *_STARTS, "kwargs"),
        (*_CHUNK, *_STARTS, "use_graph", "max_num_seqs", "kwargs"),  # 0.6
    )
    yield functions.replaced(
        ("fla.ops.kda.fused_recurrent",),
        "fused_recurrent_kda",
        token_by_token,
        (*_RECURRENT, "state_v_first", "cu_seqlens", "kwargs"),
        op="chunk_kda",
    )


def by_chunks(
    *args, disable_recompute=False, return_intermediate_states=False, cp_context=None,
    use_graph=False, max_num_seqs=None, **options,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of `chunk_kda`.

    disable_recompute only trades memory for time; npu-ops always recomputes.
    """
    functions.refuse(
        return_intermediate_states=return_intermediate_states, cp_context=cp_context,
        use_graph=use_graph,
    )  # fmt: skip
    return _ours(_CHUNK, args, options)


def token_by_token(*args, **options) -> Callable:
    """Return the npu-ops call for this call of `fused_recurrent_kda`."""
    return _ours(_RECURRENT, args, options | {"chunk_size": 1})


def _ours(names, args, options) -> Callable:
    """Return the npu-ops call for positional arguments with these names, and options by name.

    fla accepts A_log and dt_bias of any shape, even if no flag uses them.
    """
    options = dict(options)
    transpose_state_layout = options.pop("transpose_state_layout", None)
    if len(args) > len(names):
        raise TypeError(f"got {len(args)} positional arguments, needs {len(names)} at most")
    call = _Call(**dict(zip(names, args, strict=False)), **options)
    if not call.use_gate_in_kernel:
        call = call._replace(lower_bound=None)
    call = functions.converted(call, transpose_state_layout)
    call = call._replace(
        safe_gate=False,
        cu_seqlens_cpu=None,
        **{n: x.reshape(-1) for n in ("A_log", "dt_bias") if (x := getattr(call, n)) is not None},
    )
    check_call(call)
    check_device(call.q)
    return functools.partial(npu_ops.chunk_kda, **call._asdict())
