"""Kimi Delta Attention on the CPU, by torch's operators in fp32.

The loop over states and chunks is that of the chunked gated delta rule (sequences_cpu.py). S is the
state before a chunk, S' the state after it, N the values that tokens write to the state, and O
their outputs. G_i `[K]` is the sum of the log decays up to token i, and c the last token:

    L_ij = beta_i sum(k_i k_j exp(G_i - G_j)), j < i      P_ij = sum(q_i k_j exp(G_i - G_j)), j <= i
    A = (1 + L)^-1      R = beta (V - (exp(G) K) S)      N = A R
    O = (exp(G) Q) S + P N      S' = exp(G_c) S + (exp(G_c - G) K)^T N

exp(G_i - G_j) cannot be split into a factor of row i and a factor of column j that both stay
finite. So pairs of tokens are computed by levels. At level b a chunk is cut into blocks of 2 b
tokens. A pair belongs to the level at which j is in the first half of a block and i in its second
half. Let r be the first row of that second half. Both exp(G_i - G_r) and exp(G_r - G_j) are decays,
at most 1 if g is not positive.
"""

from __future__ import annotations

import torch

from npu_ops.core import make
from npu_ops.ops.chunk_gated_delta_rule import sequences_cpu, token_by_token
from npu_ops.ops.chunk_gated_delta_rule.sequences_cpu import Inputs, grouped

# Lower bound of g. Its decay is 0 in fp32. With -inf, differences of sums would be NaN.
_LOWEST = -1e5


def _levels(sums):
    """Yield (decays, pairs, is_second) of each level.

    decays: fp32 `[G, H, c, K]`, from each token to the middle of its block, or from the middle to
    the token. pairs: bool `[c, c]`, the pairs that belong to the level. is_second: bool `[c]`,
    tokens in the second half of their block.

    sums: fp64 `[G, H, c, K]`.
    """
    count = sums.shape[2]
    token = make.counted(count)
    half = 1
    while half < count:
        is_second = token // half % 2 == 1
        same = token[:, None] // (2 * half) == token[None] // (2 * half)
        middle = (token // (2 * half) * 2 * half + half).clamp(max=count - 1)
        to_middle = sums - sums[:, :, middle]
        decays = torch.where(is_second[:, None], to_middle, -to_middle)
        # Tokens of a short block without a second half are in no pair.
        decays = decays.masked_fill((middle // half % 2 == 0)[:, None], 0.0)
        yield decays.exp().float(), same & is_second[:, None] & ~is_second[None], is_second
        half *= 2


class _Chunk:
    """One chunk, the tokens `span` of sequence b: its decays, N (`written`) and O (`o`).

    state: the state before the chunk.
    """

    def __init__(self, x: Inputs, scratch, b, span, state, *, queries=True):
        heads, count = x.q.shape[2], span.stop - span.start
        self.q_given, self.k_given = x.q[b, span], x.k[b, span]
        shape = heads, count, x.q.shape[3]
        self.q = x.read(self.q_given, self.k_given.new_empty(shape, dtype=torch.float32))
        self.q.mul_(x.scale)
        self.k = x.read(self.k_given, torch.empty_like(self.q))
        v, g = (grouped(y[b, span], heads) for y in (x.v, x.g))
        self.beta = grouped(x.beta[b, span, :, None], heads)
        sums = g.double().clamp(min=_LOWEST).cumsum(2)
        self.since, self.until = (y.exp().float() for y in (sums, sums[:, :, -1:] - sums))
        self.levels = list(_levels(sums))
        self.own = torch.eye(count, dtype=torch.float32, device="cpu")
        kk = self.q.new_zeros((*g.shape[:2], count, count))
        self.scores = (self.q * self.k).sum(-1)[..., None] * self.own.expand_as(kk)
        for decays, pairs, _ in self.levels:
            faded = decays * self.k
            kk += faded @ faded.mT * pairs
            self.scores += (decays * self.q) @ faded.mT * pairs
        self.kk = kk
        self.inverse = torch.linalg.solve_triangular(
            self.beta * kk + self.own, self.own.expand_as(kk), upper=False, unitriangular=True
        )
        self.missed = v.float() - (self.since * self.k) @ state
        self.written = self.inverse @ (self.beta * self.missed)
        self.o = (self.since * self.q) @ state if queries else None

    def read(self):
        """Return O, `[G, H, c, V]`."""
        return self.o + self.scores @ self.written

    def next_state(self, state, out):
        """Write the state after the chunk to `out`, which may be `state`."""
        return torch.add(self._decay() * state, (self.until * self.k).mT @ self.written, out=out)

    def _decay(self):
        """Return the decay of a state over the whole chunk, `[G, H, K, 1]`."""
        return self.since[:, :, -1, :, None]

    def backward(self, x, scratch, grad_o_tokens, state, grad_state,
                 grad_q, grad_k, grad_v, grad_g, grad_beta):  # fmt: skip
        """Write the chunk's gradients, and update `grad_state` in place.

        grad_state: on entry, the gradient of the state after the chunk; on return, the gradient of
        the state before the chunk.

        The gradient of G_i has three parts: q_i times the gradient of q_i; plus k_i times its
        gradient as a row of L and of the recalled values; minus k_i times its gradient as a column.
        The contribution of token i to the state S' depends only on the gates after i. Its gradient
        is summed separately, because within the sums it would cancel only up to rounding.
        """
        q, k, heads = self.q, self.k, x.q.shape[2]
        grad_o = grouped(grad_o_tokens, heads).float()
        # Gradients through O = ... + P N, S' = ... + (exp(G_c - G) K)^T N and N = A R. In the code,
        # P is scores, N written, A inverse, S' the state after the chunk, and G sums.
        grad_scores = grad_o @ self.written.mT
        grad_solved = self.scores.mT @ grad_o + (self.until * k) @ grad_state
        grad_missed = self.inverse.mT @ grad_solved
        grad_solve = -(grad_missed @ self.written.mT)
        grad_values = self.beta * grad_missed
        grad_betas = (grad_missed * self.missed).sum(-1) + (grad_solve * self.kk).sum(-1)
        grouped(grad_v, heads).copy_(grad_values)
        grouped(grad_beta[..., None], heads).copy_(grad_betas[..., None])
        # Gradients of q and k through their products with S, and of k through the writes to S'.
        of_q = self.since * (grad_o @ state.mT)
        of_k = -self.since * (grad_values @ state.mT)
        of_written = self.until * (self.written @ grad_state.mT)
        grad_sums = q * of_q + k * of_k
        grad_sums[:, :, -1] += self._decay()[..., 0] * (state * grad_state).sum(-1)
        of_k += of_written
        own = (grad_scores * self.own).sum(-1, keepdim=True)
        of_q += own * k
        of_k += own * q
        for decays, pairs, is_second in self.levels:
            by_q, by_k = grad_scores * pairs, self.beta * grad_solve * pairs
            faded = decays * k
            more_q = decays * (by_q @ faded)
            more_k = decays * ((by_k + by_k.mT) @ faded + by_q.mT @ (decays * q))
            grad_sums += q * more_q + k * torch.where(is_second[:, None], more_k, -more_k)
            of_q += more_q
            of_k += more_k
        grad_decays = grad_sums.flip(2).cumsum(2).flip(2)
        grad_decays[:, :, 1:] += (k * of_written)[:, :, :-1].cumsum(2)
        grouped(grad_g, heads).copy_(grad_decays)
        x.read_backward(of_q.sum(0).mul_(x.scale), self.q_given, grad_q)
        x.read_backward(of_k.sum(0), self.k_given, grad_k)
        grad_state.mul_(self._decay())
        grad_state += (self.since * q).mT @ grad_o - (self.since * k).mT @ grad_values


def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
):  # fmt: skip
    """Write o, and final_state unless it is None. Arguments as in the operator."""
    x = Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    sequences_cpu.forward(_Chunk, x, initial_state, o, final_state)


def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None."""
    chunk_size = token_by_token.chunk_size_of_backward(chunk_size)
    x = Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    gradients = grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state
    sequences_cpu.backward(_Chunk, x, grad_o, grad_final_state, initial_state, *gradients)
