"""Replaces the chunked gated delta rule that Megatron's GatedDeltaNet takes from fla for training.

In deterministic mode Megatron calls its own function, which is not replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK_SIZES
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import MAX_DIM
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch

_KNOWN = frozenset(inspect.signature(npu_ops.chunk_gated_delta_rule).parameters)

_HEAD = (
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
    "use_qk_l2norm_in_kernel",
)
_BETA = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first")
_PACKED = ("cu_seqlens", "cu_seqlens_cpu")
SIGNATURES = (
    None,  # without fla
    (*_HEAD, "cu_seqlens", "head_first"),  # fla 0.3
    (*_HEAD, "cu_seqlens", "kwargs"),  # 0.4
    (*_HEAD, *_PACKED, "cp_context", "transpose_state_layout", "kwargs"),  # 0.4.2
    (*_HEAD, *_BETA, *_PACKED, "cp_context", "kwargs"),  # 0.5.1
    (*_HEAD, *_BETA, *_PACKED, "chunk_indices", "cp_context", "kwargs"),  # 0.6
    (*_HEAD, "cu_seqlens", "chunk_size", "head_first"),  # MindSpeed
)


def patches() -> Iterable[Patch]:
    """Patch `chunk_gated_delta_rule`, which a layer looks up when it is built or at each call."""
    yield from gated_delta_net.replaced(
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule",
        replace,
        SIGNATURES,
        also=gated_delta_net.importers(),
    )


def replace(original: Callable | None) -> Callable:
    """Return a function that runs supported calls with npu-ops and others with `original`.

    Megatron's inference keeps states in the parameters' dtype. As in fla, a half-precision state is
    converted to fp32, and the final state is fp32.
    """

    @functools.wraps(original or npu_ops.chunk_gated_delta_rule, assigned=(), updated=())
    def npu_ops_chunk(q, k, v, g, beta, *more, **options):
        ours = options
        if getattr(options.get("initial_state"), "dtype", None) in (torch.float16, torch.bfloat16):
            ours = options | {"initial_state": options["initial_state"].float()}
        if original is None or (not more and _is_ours(q, k, v, g, beta, **ours)):
            return npu_ops.chunk_gated_delta_rule(q, k, v, g, beta, *more, **ours)
        return original(q, k, v, g, beta, *more, **options)

    return npu_ops_chunk


def _is_ours(q, k, v, g, beta, initial_state=None, chunk_size=64, **options) -> bool:
    tensors = (q, k, v, g, beta, *([] if initial_state is None else [initial_state]))
    return (
        options.keys() <= _KNOWN
        and all(isinstance(x, torch.Tensor) and x.dtype in check.FLOATS for x in tensors)
        and all(x.device == q.device for x in tensors)
        and q.dtype == k.dtype == v.dtype
        and q.dim() == v.dim() == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and 0 < q.shape[2] <= v.shape[2]
        and v.shape[2] % q.shape[2] == 0
        and 0 < q.shape[3] <= MAX_DIM
        and 0 < v.shape[3] <= MAX_DIM
        and g.shape == beta.shape == v.shape[:3]
        and (initial_state is None or initial_state.dtype == torch.float32)
        and chunk_size in CHUNK_SIZES
    )
