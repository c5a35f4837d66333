"""Reference of Gated Delta Net's decoding step, in plain PyTorch.

It computes in fp32 (fp64 for fp64 inputs), and reads indices and lengths on the host.
"""

from __future__ import annotations

import torch

from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype, step
from npu_ops.ops.gdn_gate.softplus import rate_of


def gated_delta_rule_update(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens, num_accepted_tokens,
    intermediate_states, intermediate_state_indices, scale, normalize, state_v_first, update,
    softplus_beta, softplus_threshold,
):  # fmt: skip
    """Return o `[tokens, HV, V]`, fp32 or fp64. Updates state and intermediate_states in place."""
    decay, beta = _gates(a, b, A_log, dt_bias, softplus_beta, softplus_threshold)
    tokens = _tokens(q, k, v, decay, beta, scale, normalize)
    o = torch.zeros_like(tokens[2])

    def as_stored(matrix):
        return matrix.transpose(-1, -2) if state_v_first else matrix

    for sequence in sequences(
        q.shape[0], state_indices, cu_seqlens, num_accepted_tokens, intermediate_states,
        intermediate_state_indices,
    ):  # fmt: skip
        begin, end, (kept, *first), slots, row = sequence
        source = intermediate_states if kept else state
        matrix = as_stored(source[tuple(first)]).to(o.dtype)
        for i, t in enumerate(range(begin, end)):
            matrix, o[t] = step(matrix, *(x[t] for x in tokens))
            if row >= 0:
                intermediate_states[row, i] = as_stored(matrix)
            if update and slots[i] >= 0:
                state[slots[i]] = as_stored(matrix)
    return o


def sequences(
    tokens, state_indices, cu_seqlens, num_accepted_tokens, intermediate_states,
    intermediate_state_indices,
):  # fmt: skip
    """Iterate over the sequences that are not skipped and have tokens; read values on the host.

    Yields for each sequence:
        begin, end: its tokens.
        first: where its state is: (0, slot) in the pool, or (1, row, step) in the intermediate
            states.
        slots: for each token, the slot for the state after it; -1: do not store this state.
        row: the row of the intermediate states for these states; -1: do not store them there.
    """
    count = state_indices.shape[0]
    length = tokens // max(1, count)
    starts = [n * length for n in range(count + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [-1] * count if intermediate_states is None else list(range(count))
    if intermediate_state_indices is not None:
        rows = intermediate_state_indices.tolist()
    for n, slots in enumerate(state_indices.tolist()):
        begin, end = starts[n : n + 2]
        accepted = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n])
        slot_per_token = isinstance(slots, list)
        slot = slots[min(max(1, accepted), len(slots)) - 1] if slot_per_token else slots
        if begin == end or slot < 0:
            continue
        first = (0, slot) if slot_per_token or not accepted else (1, rows[n], accepted - 1)
        last_alone = [-1] * (end - begin - 1) + [slot]
        yield begin, end, first, slots if slot_per_token else last_alone, rows[n]


def _gates(a, b, A_log, dt_bias, softplus_beta, softplus_threshold):
    """Return each token's decay and beta, `[tokens, HV]`."""
    if A_log is None:
        wide = compute_dtype(a, b)
        return a.to(wide).exp(), b.to(wide)
    wide = compute_dtype(a, b, A_log, dt_bias)
    raw = a.to(wide) + dt_bias  # rate_of returns the dtype of raw
    root, _, plus = rate_of(A_log, raw, softplus_beta, softplus_threshold)
    return torch.exp(-(root * plus * root)), b.to(wide).sigmoid()


def _tokens(q, k, v, decay, beta, scale, normalize):
    """Return the arguments of `step` for all tokens, `[tokens, HV, ...]`; q and k are repeated."""
    wide = compute_dtype(q, k, v, decay, beta)
    group = v.shape[1] // q.shape[1]
    q, k = (x.to(wide) for x in (q, k))
    if normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, 1) for x in (q * scale, k))
    return q, k, v.to(wide), beta.to(wide)[..., None], decay.to(wide)[..., None, None]
