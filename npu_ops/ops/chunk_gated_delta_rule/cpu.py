"""Computes chunk_gated_delta_rule on the CPU with torch's operators, and native code for the gates.

It processes one sequence and one chunk at a time, with all heads at once, so that a chunk's data
stays in the cache. It computes in fp32, because CPUs without matrix units are slower in bf16.

S is the state before a chunk, S' the state after it, N the values that tokens write to the state,
and O their outputs. D_ij is the decay from token j to token i >= j. `since` is the decay from the
start of the chunk to a token, and `until` the decay from a token to the chunk's end:

    A = (1 + L)^-1, L = beta (K K^T) D below the diagonal        P = (Q K^T) D up to the diagonal
    R = beta (V - since K S)      N = A R      O = since Q S + P N      S' = decay S + K^T (until N)

Sequences of at most 4 tokens are computed token by token, in one call for all of them.

Tensors by value head are `[G, H, ...]`, with G value heads for each of H key heads. A product of
keys or queries with such a tensor is one batched product for each index along G. Keys and queries
are stacked as `[H, 2c, K]`, so that one product serves both.
"""

from __future__ import annotations

import torch

from npu_ops.core.registry import from_native
from npu_ops.ops.chunk_gated_delta_rule import sequences_cpu, token_by_token
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.sequences_cpu import Inputs, grouped

_gates = from_native(
    "chunk_gated_delta_rule_gates_cpu(Tensor recalled, Tensor g, Tensor beta, Tensor(a!) inverse, "
    "Tensor(b!)? attention, Tensor(c!) decays) -> ()"
)()
_gates_backward = from_native(
    "chunk_gated_delta_rule_gates_backward_cpu(Tensor recalled, Tensor g, Tensor beta, "
    "Tensor grad_solve, Tensor grad_attention, Tensor grad_beta_in, Tensor grad_total_in, "
    "Tensor kept, Tensor faded, Tensor(a!) grad_recalled, Tensor(b!) grad_g, "
    "Tensor(c!) grad_beta) -> ()"
)()
# The native decoding step, from `gated_delta_rule_update`.
_step = torch.ops.npu_ops.gated_delta_rule_update_cpu.default


def _flat(x):
    return x.flatten(0, 1)


def _each(a, b, out):
    """Write `a[g] @ b[g]` to `out[g]` for each index g along G; a may lack this dimension."""
    for g in range(out.shape[0]):
        torch.bmm(a if a.dim() == 3 else a[g], b[g], out=out[g])
    return out


def _add_each(total, a, b):
    """Add `a[g] @ b[g]` to `total[g]` for each g along G. a or total may lack this dimension."""
    for g in range(b.shape[0]):
        (total if total.dim() == 3 else total[g]).baddbmm_(a if a.dim() == 3 else a[g], b[g])


class _Chunk:
    """One chunk, the tokens `span` of sequence b: its decays, N (`solved`) and O (`o`).

    state: the state before the chunk.
    """

    def __init__(self, x: Inputs, scratch, b, span, state, *, queries=True):
        self.count = count = span.stop - span.start
        group, heads, keys, values = x.state_shape
        self.g, self.beta = x.g[b, span], x.beta[b, span]
        rows = 2 * count if queries else count
        self.kq = scratch("kq", heads, rows, keys)
        self.k = self.kq[:, :count]
        self.q_given, self.k_given = x.q[b, span], x.k[b, span]
        x.read(self.k_given, self.k)
        if queries:
            x.read(self.q_given, self.kq[:, count:]).mul_(x.scale)  # in fp32
        self.v = scratch("v", group, heads, count, values)
        self.v.copy_(grouped(x.v[b, span], heads))
        self.products = torch.bmm(
            self.kq, self.k.transpose(1, 2), out=scratch("products", heads, rows, count)
        )
        square = group, heads, count, count
        self.inverse = scratch("inverse", *square)
        self.attention = scratch("attention", *square) if queries else None
        self.decays = scratch("decays", 3, group, heads, count)
        _gates(self.products, self.g, self.beta, self.inverse, self.attention, self.decays)
        self.recalled = _each(self.kq, state, scratch("recalled", group, heads, rows, values))
        since, _, beta = self.decays[..., None]
        missed = torch.addcmul(self.v, since, self.recalled[:, :, :count], value=-1).mul_(beta)
        self.o = self.recalled[:, :, count:] * since if queries else None
        self.solved = scratch("solved", *self.v.shape)
        torch.bmm(_flat(self.inverse), _flat(missed), out=_flat(self.solved))
        self.written = scratch("written", *self.v.shape)
        torch.mul(self.solved, self.decays[1, ..., None], out=self.written)

    def read(self):
        """Return O, `[G, H, c, V]`."""
        _flat(self.o).baddbmm_(_flat(self.attention), _flat(self.solved))
        return self.o

    def decay(self):
        """Return the decay of a state over the whole chunk."""
        return self.decays[0, :, :, -1, None, None]

    def next_state(self, state, out):
        torch.mul(state, self.decay(), out=out)
        _add_each(out, self.k.transpose(1, 2), self.written)
        return out

    def backward(self, x, scratch, grad_o_tokens, state, grad_state,
                 grad_q, grad_k, grad_v, grad_g, grad_beta):  # fmt: skip
        """Write the chunk's gradients, and update `grad_state` in place.

        grad_state: on entry, the gradient of the state after the chunk; on return, the gradient
        of the state before the chunk.
        """
        group, heads, count, values = like = self.v.shape
        keys, square = self.k.shape[2], (group, heads, count, count)
        grad_o = scratch("grad_o", *like).copy_(grouped(grad_o_tokens, heads))
        # Differentiate O = ... + P N, S' = ... + K^T (until N)
        grad_attention = scratch("grad_attention", *square)
        torch.bmm(_flat(grad_o), _flat(self.solved).transpose(1, 2), out=_flat(grad_attention))
        grad_solved = scratch("grad_solved", *like)
        torch.bmm(_flat(self.attention).transpose(1, 2), _flat(grad_o), out=_flat(grad_solved))
        grad_written = _each(self.k, grad_state, scratch("grad_written", *like))
        since, until, beta = self.decays
        grad_solved.addcmul_(grad_written, until[..., None])
        kept = until * (self.solved * grad_written).sum(-1)
        # Differentiate N = A R
        grad_missed = scratch("grad_missed", *like)
        torch.bmm(_flat(self.inverse).transpose(1, 2), _flat(grad_solved), out=_flat(grad_missed))
        grad_solve = scratch("grad_solve", *square)
        torch.bmm(_flat(grad_missed), _flat(self.solved).transpose(1, 2), out=_flat(grad_solve))
        # Differentiate R = beta (V - since K S), O = since Q S + ...
        by_k, by_q = self.recalled.split(count, 2)
        grad_values = grad_missed * beta[..., None]
        grad_recalled = torch.cat((-grad_values, grad_o), 2).mul_(
            torch.cat((since, since), 2)[..., None]
        )
        through_k = since * (grad_missed * by_k).sum(-1)
        grad_betas = (grad_missed * self.v).sum(-1) - through_k
        grad_since = since * (grad_o * by_q).sum(-1) - beta * through_k
        grouped(grad_v, heads).copy_(grad_values)
        # The gradients of S, the gates, and the products K K^T and Q K^T
        grad_k_written = scratch("grad_k_written", heads, count, keys)
        torch.bmm(self.written[0], grad_state[0].transpose(1, 2), out=grad_k_written)
        _add_each(grad_k_written, self.written[1:], grad_state[1:].transpose(2, 3))
        faded = since[:, :, -1] * (state * grad_state).sum((2, 3))
        grad_state.mul_(self.decay())
        _add_each(grad_state, self.kq.transpose(1, 2), grad_recalled)
        grad_products = scratch("grad_products", heads, 2 * count, 2 * count)
        _gates_backward(
            self.products, self.g, self.beta, grad_solve, grad_attention, grad_betas, grad_since,
            kept, faded, grad_products, grad_g, grad_beta,
        )  # fmt: skip
        grad_kq = torch.bmm(grad_products, self.kq, out=scratch("grad_kq", heads, 2 * count, keys))
        _add_each(grad_kq, grad_recalled, state.transpose(2, 3))
        x.read_backward(grad_kq[:, :count].add_(grad_k_written), self.k_given, grad_k)
        x.read_backward(grad_kq[:, count:].mul_(x.scale), self.q_given, grad_q)


@torch.autocast("cpu", enabled=False)
def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state, chunk_states=None,
):  # fmt: skip
    """Compute the forward pass on the CPU: write o, final_state and chunk_states.

    Arguments as in the operator. If final_state or chunk_states is None, it is not written.
    """
    if chunk_size == TOKEN:
        inputs = q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize
        return token_by_token.forward(_step, *inputs, o, final_state)
    x = Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    sequences_cpu.forward(_Chunk, x, initial_state, o, final_state, chunk_states)


chunk_gated_delta_rule_prefill = chunk_gated_delta_rule


def chunk_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None."""
    chunk_size = token_by_token.chunk_size_of_backward(chunk_size)
    x = Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    gradients = grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state
    sequences_cpu.backward(_Chunk, x, grad_o, grad_final_state, initial_state, *gradients)
