"""Runs gated_delta_rule_update with torch_npu's `npu_recurrent_gated_delta_rule`.

Its limits are from torch_npu's documentation. The operator does not support slot -1, and looking
for a -1 on the host would wait for the device. So the operator gets copies of the pool's states,
one for each token, and the states of valid slots are copied back.
"""

from __future__ import annotations

import functools

import torch

from npu_ops.core import check, make
from npu_ops.core.library import torch_npu_why_not
from npu_ops.ops.gdn_gate import reference as gate
from npu_ops.ops.l2norm import reference as norm

_HEADS, _DIM, _TOKENS = 256, 512, 8
_EPS = 1e-6  # eps of the norm of q and k


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    return limits(arguments) or _missing()


def limits(arguments) -> str | None:
    """Return None, or why torch_npu's operator does not support a call.

    fla_npu's operator has the same limits.
    """
    q, v, state = arguments.q, arguments.v, arguments.state
    if {x.dtype for x in (q, arguments.k, v)} != {torch.bfloat16}:
        return f"q is {check.short(q.dtype)}, the vendor's operator takes bfloat16 q, k and v"
    if state.dtype != torch.bfloat16:
        return f"states are {check.short(state.dtype)}, the vendor's operator takes bfloat16 states"
    if arguments.cu_seqlens is not None:
        return "the vendor's operator takes no empty sequences and no tokens outside sequences"
    if arguments.intermediate_states is not None:
        return "the vendor's operator writes no intermediate states"
    length = q.shape[0] // arguments.state_indices.shape[0]
    if length > _TOKENS:
        return f"sequences have {length} tokens, the vendor's operator takes at most {_TOKENS}"
    if max(q.shape[1], v.shape[1]) > _HEADS or max(q.shape[2], v.shape[2]) > _DIM:
        return f"the vendor's operator takes at most {_HEADS} heads of {_DIM} elements"
    if not state.numel():
        return "the pool is empty, the vendor's operator takes no empty tensor"
    return None


_missing = functools.partial(
    torch_npu_why_not, "npu_recurrent_gated_delta_rule", "beta", "scale", "actual_seq_lengths",
    "ssm_state_indices", "g",
)  # fmt: skip


def gated_delta_rule_update(*arguments) -> None:
    """Write o, and update the states in place. Arguments as in the operator."""
    update_by(recurrent, *arguments)


def update_by(
    run, q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens, num_accepted_tokens,
    intermediate_states, intermediate_state_indices, scale, normalize, state_v_first, update,
    softplus_beta, softplus_threshold, o,
):  # fmt: skip
    """Compute `gated_delta_rule_update` by `run`, a function with the arguments of `recurrent`."""
    tokens, count = q.shape[0], state_indices.shape[0]
    pool = state if state_v_first else state.transpose(-1, -2)
    first, slots, right = _slots(state_indices, num_accepted_tokens, tokens // count)
    known = right & (first >= 0) & (first < pool.shape[0])
    # The operator reads the initial state from the row of a sequence's first token. It overwrites
    # the row of each token with the state after that token.
    states = pool.new_empty((tokens, *pool.shape[1:]))
    states[:: tokens // count] = pool[first.clamp(0, pool.shape[0] - 1)]
    g, beta = a, b
    if A_log is not None:
        g, beta = gate.gdn_gate(a, A_log, dt_bias, b, 1.0, softplus_beta, softplus_threshold)
    if normalize:
        # Rounded to bf16, the dtype that the operator reads.
        q, k = (norm.l2norm(x, _EPS).to(x.dtype) for x in (q, k))
    found = run(q, k, v, states, beta.to(q.dtype), g.float(), count, scale)
    _write(found, known, right & (first == -1), slots, pool.shape[0], o)
    if update:
        kept = known[:, None] & (slots >= 0) & (slots < pool.shape[0])
        _put(pool, slots.flatten(), states, kept.flatten())


def recurrent(q, k, v, states, beta, g, count: int, scale: float):
    """Return o `[tokens, HV, V]` of `count` sequences of equal length.

    Overwrite row t of `states` with the state after token t.
    """
    tokens = q.shape[0]
    lengths = torch.full((count,), tokens // count, dtype=torch.int32, device=q.device)
    return torch.ops.npu.npu_recurrent_gated_delta_rule(
        q, k, v, states, beta=beta, scale=scale, actual_seq_lengths=lengths,
        ssm_state_indices=make.counted(tokens, device=q.device).int(), g=g,
    )  # fmt: skip


def _slots(state_indices, accepted, length: int):
    """Return where each sequence's state is read and written, and whether its counts are valid.

    The slots to read are `[N]`; the slots for the states after tokens are `[N, length]`, -1 for
    nowhere; the validity is `[N]`.
    """
    right = torch.ones_like(state_indices.view(len(state_indices), -1)[:, 0], dtype=torch.bool)
    if state_indices.dim() == 1:
        slots = state_indices.new_full((len(state_indices), length), -1)
        slots[:, -1] = state_indices
        return state_indices.long(), slots.long(), right
    steps = state_indices.shape[1]
    column = torch.zeros_like(state_indices[:, 0])
    if accepted is not None:
        right = (accepted >= 1) & (accepted <= steps)
        column = accepted.clamp(1, steps) - 1
    first = state_indices.gather(1, column.long()[:, None])[:, 0]
    return first.long(), state_indices[:, :length].long(), right


def _write(found, known, skipped, slots, size: int, o) -> None:
    """Write o: 0 for skipped sequences, NaN for a slot that is not in the pool."""
    fine = known[:, None] & (slots >= -1) & (slots < size)
    other = torch.where(skipped, 0.0, torch.nan)[:, None].expand_as(fine)
    fine, other = (x.flatten()[:, None, None] for x in (fine, other))
    o.copy_(torch.where(fine, found, other.to(found.dtype)))


def _put(pool, slots, states, kept) -> None:
    """Set pool[slots[i]] = states[i] where kept[i], without waiting for the device.

    The other rows repeat the write of a kept row; if none is kept, a slot gets its own values
    again.
    """
    source = torch.where(kept, make.counted(len(kept), device=kept.device), kept.int().argmax())
    target = slots[source].clamp(0, len(pool) - 1)
    pool[target] = torch.where(kept.any(), states[source], pool[target])
