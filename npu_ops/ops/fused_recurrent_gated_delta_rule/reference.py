"""The gated delta rule, one token after another, in plain PyTorch: the definition of right.

Computed in fp32 (fp64 for fp64 inputs). Reads `cu_seqlens` on the host.
"""

from __future__ import annotations

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """fp32, or fp64 where a tensor has it."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def step(state, q, k, v, beta, decay):
    """One token of every value head: the next state, and what q reads from it.

    The state decays, then what it recalls for k moves by beta of the way to v.
    state: `[HV, K, V]`. q, k: `[HV, K]`. v: `[HV, V]`. beta, decay: broadcast to v and the state.
    """
    state = state * decay
    recalled = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta * (v - recalled))[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def step_backward(dstate, do, state, q, k, v, beta, decay):
    """The gradients of a step: of the state before it, and of q, k, v, beta and log(decay).

    dstate, do: the gradients of what `step` returned. state: the one before the step.
    """
    state = state * decay
    error = v - (state * k[..., None]).sum(-2)
    write, do = (beta * error)[..., None, :], do[..., None, :]
    dq = ((state + k[..., None] * write) * do).sum(-1)
    dstate = dstate + q[..., None] * do
    dwrite = (dstate * k[..., None]).sum(-2)
    dv = beta * dwrite
    dk = (dstate * write - state * dv[..., None, :]).sum(-1)
    dstate = dstate - k[..., None] * dv[..., None, :]
    return dstate * decay, dq, dk, dv, error * dwrite, dstate * state


def fused_recurrent_gated_delta_rule(
    q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, state_v_first
):
    """o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or fp64.

    beta has a last dimension of 1 or V; the rest is as in the public function.
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
    do, dht, q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, state_v_first
):
    """The gradients of the eight tensors, fp32 or fp64; also of those that are None."""
    tokens = _tokens(q, k, v, g, gk, gv, beta, initial_state, scale)
    do = do.to(tokens[2].dtype).flatten(0, 1)
    log_decay = do.new_empty((*do.shape[:2], q.shape[3], v.shape[3]))
    gradients = [torch.zeros_like(x) for x in (*tokens[:3], do, log_decay)]
    dfirst = []
    for n, (begin, end) in enumerate(_spans(cu_seqlens, *q.shape[:2])):
        states = [_first_state(initial_state, n, tokens, state_v_first)]
        for t in range(begin, end):
            states.append(step(states[-1], *(x[t] for x in tokens))[0])
        dstate = _first_state(dht, n, tokens, state_v_first)
        for t in reversed(range(begin, end)):
            dstate, *of_token = step_backward(
                dstate, do[t], states[t - begin], *(x[t] for x in tokens)
            )
            for gradient, one in zip(gradients, of_token, strict=True):
                gradient[t] = one
        dfirst.append(dstate)
    dq, dk, dv, dbeta, dlog = gradients
    dq, dk = (x.unflatten(1, (q.shape[2], -1)).sum(2) for x in (dq * scale, dk))
    if beta.shape[-1] == 1:
        dbeta = dbeta.sum(-1, keepdim=True)
    dg, dgk, dgv = dlog.sum((-1, -2)), dlog.sum(-1), dlog.sum(-2)
    by_token = (x.unflatten(0, q.shape[:2]) for x in (dq, dk, dv, dg, dgk, dgv, dbeta))
    return *by_token, _as_stored(torch.stack(dfirst), state_v_first)


def _tokens(q, k, v, g, gk, gv, beta, initial_state, scale):
    """What a step takes of each token, q scaled and q and k repeated for each value head."""
    wide = compute_dtype(q, k, v, g, gk, gv, beta, initial_state)
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(wide).repeat_interleave(group, 2) for x in (q, k))
    log_decay = v.new_zeros((*v.shape[:3], 1, 1), dtype=wide)
    for gate, place in ((g, (..., None, None)), (gk, (..., None)), (gv, (..., None, slice(None)))):
        if gate is not None:
            log_decay = log_decay + gate.to(wide)[place]
    return [x.flatten(0, 1) for x in (q * scale, k, v.to(wide), beta.to(wide), log_decay.exp())]


def _spans(cu_seqlens, batch, length):
    """Where each sequence begins and ends in the tokens."""
    starts = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return list(zip(starts, starts[1:], strict=False))


def _first_state(states, n, tokens, state_v_first):
    """State n as `[HV, K, V]`; 0 where there are none."""
    q, _, v = tokens[:3]
    if states is None:
        return v.new_zeros((v.shape[1], q.shape[2], v.shape[2]))
    return _as_stored(states[n].to(v.dtype), state_v_first)


def _as_stored(states, state_v_first):
    """Between `[..., K, V]` and how states are stored; its own inverse."""
    return states.transpose(-1, -2) if state_v_first else states
