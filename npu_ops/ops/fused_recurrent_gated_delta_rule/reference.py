"""Shared by all gated delta rules: their reference.

It processes one token after another in plain PyTorch, in fp32 (fp64 for fp64 inputs). It reads
`cu_seqlens` on the host.
"""

from __future__ import annotations

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return fp64 if a tensor has it, else fp32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def step(state, q, k, v, beta, decay):
    """Compute one token for all value heads.

    Args:
        state, decay: `[HV, K, V]`. decay may broadcast.
        q, k: `[HV, K]`.
        v, beta: `[HV, V]`. beta may broadcast.

    Returns:
        The next state, `S = decay * state; S += k (beta * (v - S^T k))^T`, and the output, `S^T q`.
    """
    state = state * decay
    recalled = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta * (v - recalled))[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def step_backward(grad_state, grad_o, state, q, k, v, beta, decay):
    """Return the gradients of a step: of the state before it, and of q, k, v, beta and log(decay).

    grad_state, grad_o: gradients of the outputs of `step`. state: the state before the step.
    """
    state = state * decay
    error = v - (state * k[..., None]).sum(-2)
    write, grad_o = (beta * error)[..., None, :], grad_o[..., None, :]
    grad_q = ((state + k[..., None] * write) * grad_o).sum(-1)
    grad_state = grad_state + q[..., None] * grad_o
    grad_write = (grad_state * k[..., None]).sum(-2)
    grad_v = beta * grad_write
    grad_k = (grad_state * write - state * grad_v[..., None, :]).sum(-1)
    grad_state = grad_state - k[..., None] * grad_v[..., None, :]
    return grad_state * decay, grad_q, grad_k, grad_v, error * grad_write, grad_state * state


def fused_recurrent_gated_delta_rule(
    q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, state_v_first
):
    """Return o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or
    fp64.

    beta has a last dimension of 1 or V; the other arguments are those of the public function.
    """
    tokens = _tokens(q, k, v, g, gk, gv, beta, initial_state, scale)
    o, final = torch.zeros_like(tokens[2]), []
    for n, (begin, end) in enumerate(_spans(cu_seqlens, *q.shape[:2])):
        state = _first_state(initial_state, n, tokens, state_v_first)
        for t in range(begin, end):
            state, o[t] = step(state, *(x[t] for x in tokens))
        final.append(state)
    return o.view(v.shape), _as_stored(torch.stack(final), state_v_first)


def fused_recurrent_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale,
    state_v_first,
):  # fmt: skip
    """Return the gradients of q, k, v, g, gk, gv, beta and initial_state, in fp32 or fp64.

    Gradients are also returned for absent tensors.
    """
    tokens = _tokens(q, k, v, g, gk, gv, beta, initial_state, scale)
    wide_q, wide_k, wide_v, *_ = tokens
    grad_o = grad_o.to(wide_v.dtype).flatten(0, 1)
    log_decay = grad_o.new_empty((*grad_o.shape[:2], q.shape[3], v.shape[3]))
    gradients = [torch.zeros_like(x) for x in (wide_q, wide_k, wide_v, grad_o, log_decay)]
    grad_initial_state = []
    for n, (begin, end) in enumerate(_spans(cu_seqlens, *q.shape[:2])):
        states = [_first_state(initial_state, n, tokens, state_v_first)]
        for t in range(begin, end):
            states.append(step(states[-1], *(x[t] for x in tokens))[0])
        grad_state = _first_state(grad_final_state, n, tokens, state_v_first)
        for t in reversed(range(begin, end)):
            grad_state, *of_token = step_backward(
                grad_state, grad_o[t], states[t - begin], *(x[t] for x in tokens)
            )
            for gradient, one in zip(gradients, of_token, strict=True):
                gradient[t] = one
        grad_initial_state.append(grad_state)
    grad_q, grad_k, grad_v, grad_beta, grad_log = gradients
    grad_q, grad_k = (x.unflatten(1, (q.shape[2], -1)).sum(2) for x in (grad_q * scale, grad_k))
    if beta.shape[-1] == 1:
        grad_beta = grad_beta.sum(-1, keepdim=True)
    grad_g, grad_gk, grad_gv = grad_log.sum((2, 3)), grad_log.sum(3), grad_log.sum(2)
    by_token = grad_q, grad_k, grad_v, grad_g, grad_gk, grad_gv, grad_beta
    by_token = (x.unflatten(0, q.shape[:2]) for x in by_token)
    return *by_token, _as_stored(torch.stack(grad_initial_state), state_v_first)


def _tokens(q, k, v, g, gk, gv, beta, initial_state, scale):
    """Return the arguments of `step` for all tokens, `[tokens, HV, ...]`; q is scaled."""
    wide = compute_dtype(q, k, v, g, gk, gv, beta, initial_state)
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(wide).repeat_interleave(group, 2) for x in (q, k))
    log_decay = v.new_zeros((*v.shape[:3], 1, 1))
    for gate, place in ((g, (..., None, None)), (gk, (..., None)), (gv, (..., None, slice(None)))):
        if gate is not None:
            log_decay = log_decay + gate.to(wide)[place]
    return [x.flatten(0, 1) for x in (q * scale, k, v.to(wide), beta.to(wide), log_decay.exp())]


def _spans(cu_seqlens, batch, length):
    """Return where each sequence begins and ends in the tokens."""
    starts = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return list(zip(starts, starts[1:], strict=False))


def _first_state(states, n, tokens, state_v_first):
    """Return state n as `[HV, K, V]`; zeros if there are no states."""
    q, _, v = tokens[:3]
    if states is None:
        return v.new_zeros((v.shape[1], q.shape[2], v.shape[2]))
    return _as_stored(states[n].to(v.dtype), state_v_first)


def _as_stored(states, state_v_first):
    """Convert between `[..., K, V]` and the stored layout; it is its own inverse."""
    return states.transpose(-1, -2) if state_v_first else states
