"""Computes chunk_gated_delta_rule's forward with six of fla_npu's operators, one after another.

The operators' limits are from fla_npu's documentation of August 2026; only test doubles of the
operators were ever called. In these operators, heads come before tokens, and chunks have 64 tokens.
Everything that one operator passes to the next is rounded to q's dtype, except gates and final
states.
"""

from __future__ import annotations

import importlib

import torch

from npu_ops.core import check, env
from npu_ops.core.library import fla_npu_why_not
from npu_ops.ops.chunk_gated_delta_rule import reference
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.l2norm import reference as norm

_CHUNK, _KEYS, _VALUES = 64, 128, (128, 256)
# Operator -> the arguments that npu-ops passes to it by name.
_NEEDED = {
    "npu_chunk_local_cumsum": ("head_first",),
    "npu_chunk_scaled_dot_kkt": ("chunk_size",),
    "npu_solve_tri": ("layout",),
    "npu_recompute_w_u_fwd": ("g",),
    "npu_chunk_gated_delta_rule_fwd_h": ("initial_state", "output_final_state", "state_v_first"),
    "npu_chunk_fwd_o": ("g", "chunk_size"),
}


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operators do not support the arguments."""
    q, v = arguments.q, arguments.v
    if env.settings.consistent:
        return "its bits may depend on how a sequence is split"
    if arguments.chunk_size == TOKEN:
        return "fla_npu's operators compute by chunks, not token by token"
    dtypes = {x.dtype for x in (q, arguments.k, v)}
    if dtypes not in ({torch.bfloat16}, {torch.float16}):
        return f"q is {check.short(q.dtype)}, fla_npu's operators take bfloat16 or float16"
    if q.shape[3] != _KEYS or v.shape[3] not in _VALUES:
        return (
            f"K is {q.shape[3]} and V is {v.shape[3]}, fla_npu's operators take K 128, V 128 or 256"
        )
    if arguments.cu_seqlens is not None:
        return "cu_seqlens are on the device, fla_npu's operators take them on the host"
    if q.shape[1] % _CHUNK:
        return (
            f"there are {q.shape[1]} tokens, fla_npu's inverse takes multiples of {_CHUNK} tokens"
        )
    return next(filter(None, (fla_npu_why_not(name, *of) for name, of in _NEEDED.items())), None)


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
) -> None:  # fmt: skip
    """Write o and the final states. fla_npu's operators choose the chunk size."""
    of = importlib.import_module("fla_npu.ops.ascendc")
    if normalize:
        q, k = (norm.l2norm(x, reference.EPS).to(x.dtype) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in (q, k, v, g.float(), beta.float()))
    g = of.npu_chunk_local_cumsum(g, _CHUNK, head_first=True)
    pairs = of.npu_chunk_scaled_dot_kkt(k, g, beta, chunk_size=_CHUNK)
    inverse = of.npu_solve_tri(pairs.to(k.dtype), layout="bnsd")
    w, u = of.npu_recompute_w_u_fwd(k, v, beta, inverse, _CHUNK, g=g)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    states, changes, last = of.npu_chunk_gated_delta_rule_fwd_h(
        k, w, u, g, initial_state=None if initial_state is None else initial_state.contiguous(),
        output_final_state=final_state is not None, chunk_size=_CHUNK, state_v_first=False,
    )  # fmt: skip
    found = of.npu_chunk_fwd_o(q, k, changes, states, scale, g=g, chunk_size=_CHUNK)
    o.copy_(found.transpose(1, 2))
    if final_state is not None:
        final_state.copy_(last.mT if state_v_first else last)
