"""Computes chunk_gated_delta_rule's forward with torch_npu's `npu_chunk_gated_delta_rule`.

Its limits are from torch_npu's documentation. The operator keeps beta and states in bf16. The
states of `chunk_gated_delta_rule` are fp32, so calls with states do not use the operator.
"""

from __future__ import annotations

import functools

import torch

from npu_ops.core import check, env
from npu_ops.core.library import torch_npu_why_not
from npu_ops.ops.chunk_gated_delta_rule import reference
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.l2norm import reference as norm

_HEADS, _DIM = 64, 128


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    q, v = arguments.q, arguments.v
    if env.settings.consistent:
        return "its bits may depend on how a sequence is split"
    if arguments.chunk_size == TOKEN:
        return "the vendor's operator computes by chunks, not token by token"
    if {x.dtype for x in (q, arguments.k, v)} != {torch.bfloat16}:
        return f"q is {check.short(q.dtype)}, the vendor's operator takes bfloat16 q, k and v"
    if arguments.initial_state is not None or arguments.final_state is not None:
        return "states are float32, the vendor's operator keeps them in bfloat16"
    if arguments.cu_seqlens is not None:
        return "the vendor's operator takes no tokens after the last packed sequence"
    if max(q.shape[2], v.shape[2]) > _HEADS or max(q.shape[3], v.shape[3]) > _DIM:
        return f"the vendor's operator takes at most {_HEADS} heads of {_DIM} elements"
    return _missing()


_missing = functools.partial(
    torch_npu_why_not, "npu_chunk_gated_delta_rule", "beta", "initial_state", "actual_seq_lengths",
    "scale", "g",
)  # fmt: skip


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
) -> None:  # fmt: skip
    """Write o. The operator chooses the chunk size."""
    batch, tokens, heads, values = v.shape
    if normalize:
        # Rounded to bf16, the dtype that the operator reads.
        q, k = (norm.l2norm(x, reference.EPS).to(x.dtype) for x in (q, k))
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=q.device)
    state = torch.zeros((batch, heads, values, q.shape[3]), dtype=q.dtype, device=q.device)
    found, _ = torch.ops.npu.npu_chunk_gated_delta_rule(
        *(x.flatten(0, 1) for x in (q, k, v)), beta=beta.to(q.dtype).flatten(0, 1),
        initial_state=state, actual_seq_lengths=lengths, scale=scale, g=g.float().flatten(0, 1),
    )  # fmt: skip
    o.copy_(found.view(v.shape))
