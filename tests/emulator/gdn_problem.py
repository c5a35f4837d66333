"""Formulas of Gated Delta Net and inputs, with which upstream's kernels are compared."""

from __future__ import annotations

import math
import typing

import torch
import torch.nn.functional as F
import triton  # noqa: F401  (first: the emulated NPU patches it when it is imported)

BATCH, TOKENS, HEADS, VALUE_HEADS, DIM, CHUNK = 1, 128, 2, 4, 128, 64
SCALE = DIM**-0.5
LN2 = math.log(2)


# Formulas, in fp64. Tensors are [batch, token, head, ...]. Here q and k have as many heads as v
# (`expand`). `G` is the cumulative sum of the log gates within each chunk.


def expand(x):
    return x.repeat_interleave(VALUE_HEADS // HEADS, 2)


def chunks(x):
    """Return [batch, token, head, ...] as [batch, head, chunk, token in chunk, ...]."""
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def tokens(x):
    return x.movedim(1, 3).flatten(1, 2)


def recurrence(q, k, v, g, beta, state, scale=SCALE):
    """Return o and the last state, token by token. state: [batch, head, key, value]."""
    out = []
    for t in range(q.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None]
        state = state * g[:, t].exp()[..., None, None]
        value = beta[:, t, :, None, None] * (value - (state * key).sum(-2, keepdim=True))
        state = state + key * value
        out.append((state * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(out, 1), state


def sums(g, reverse=False):
    if reverse:
        return tokens(chunks(g).flip(3).cumsum(3).flip(3))
    return tokens(chunks(g).cumsum(3))


def decay(G, diagonal):
    """Return exp(G_i - G_j) on and below the given diagonal, 0 above it."""
    G = chunks(G)
    kept = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(diagonal)
    return (G[..., :, None] - G[..., None, :]).masked_fill(~kept, -math.inf).exp()


def scaled_kkt(k, beta, G):
    k = chunks(k)
    return tokens(chunks(beta)[..., None] * (k @ k.mT) * decay(G, -1))


def inverse(L):
    size = L.shape[-1]
    L = L.unflatten(1, (-1, size)).movedim(3, 1)
    return tokens(torch.linalg.inv(torch.eye(size, dtype=L.dtype) + L))


def recompute_w_u(k, v, beta, A, G):
    A = chunks(A)
    w = A @ chunks(k * (beta * G.exp())[..., None])
    return tokens(w), tokens(A @ chunks(v * beta[..., None]))


def scan(k, w, u, G, state):
    """Return the states before each chunk, the new values, and a list of all states.

    The list also has the state after the last chunk.
    """
    k, w, u, G = map(chunks, (k, w, u, G))
    states, values = [state], []
    for c in range(k.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        last = G[:, :, c, -1:]
        weight = (last - G[:, :, c]).exp()
        state = state * last[..., None].exp() + (k[:, :, c] * weight[..., None]).mT @ new
        states.append(state)
        values.append(new)
    return torch.stack(states[:-1], 1), tokens(torch.stack(values, 2)), states


def output(q, k, v_new, h, G, scale=SCALE):
    inside = chunks(q) @ chunks(k).mT * decay(G, 0) @ chunks(v_new)
    before = chunks(q * G.exp()[..., None]) @ h.transpose(1, 2)
    return tokens(inside + before) * scale


def gradients(outputs, upstream, inputs):
    return torch.autograd.grad(outputs, inputs, upstream)


def gate(a, A_log, dt_bias):
    return -A_log.exp() * F.softplus(a + dt_bias)


def l2norm(x, eps=1e-6):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def conv1d(x, weight, state=None, bias=None):
    """Return silu of a causal depthwise convolution.

    x: [batch, token, channel]. weight: [channel, width].
    """
    width = weight.shape[1]
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if state is None else state
    x = torch.cat([before, x], 1)
    y = sum(x[:, i : x.shape[1] - width + 1 + i] * weight[:, i] for i in range(width))
    return F.silu(y if bias is None else y + bias)


def rms_norm_gated(x, z, weight, eps=1e-5):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * F.silu(z)


# Inputs


def rounded(x, dtype=torch.bfloat16):
    return x.to(dtype).double()


def npu(x, dtype=torch.bfloat16):
    return x.detach().to(dtype).contiguous().npu()


def npu32(x):
    return npu(x, torch.float32)


class Problem:
    """One set of inputs, and all results of the formulas, in fp64 on the CPU.

    A result that a later kernel reads is rounded as upstream rounds it.
    """

    def __init__(self, lengths=(TOKENS,), stages=True):
        torch.manual_seed(0)
        self.lengths = list(lengths)
        keys = (BATCH, sum(lengths), HEADS, DIM)
        values = (BATCH, sum(lengths), VALUE_HEADS, DIM)
        states = (len(lengths), VALUE_HEADS, DIM, DIM)

        def leaf(x, dtype=torch.bfloat16):
            return rounded(x, dtype).requires_grad_()

        # Keys are alike: with independent keys the inverse is almost the identity.
        self.q = leaf(l2norm(torch.randn(keys)))
        self.k = leaf(l2norm(torch.rand(keys) - 0.2))
        self.v = leaf(torch.randn(values))
        self.beta = leaf(torch.rand(values[:-1]).sigmoid())
        self.g = leaf(F.logsigmoid(torch.randn(values[:-1]) + 2), torch.float32)
        self.state = leaf(torch.randn(states) / 4, torch.float32)
        self.do = rounded(torch.randn(values))
        self.dht = rounded(torch.randn(states) / 4, torch.float32)
        if stages:
            self.compute_stages(leaf)

    def compute_stages(self, leaf):
        self.G = leaf(sums(self.g).detach(), torch.float32)
        self.L = rounded(self.kkt().detach(), torch.float32)
        self.A = rounded(inverse(self.L))
        w, u = recompute_w_u(expand(self.k), self.v, self.beta, self.A, self.G)
        self.w, self.u = leaf(w.detach()), leaf(u.detach())
        h, v_new, states = self.scan()
        self.h, self.v_new = rounded(h.detach()), leaf(v_new.detach())
        out = self.output(h, v_new)
        # `dh`: gradient of the state after each chunk. `du`: upstream calls it dv.
        results = gradients((out, states[-1]), (self.do, self.dht), (self.u, *states))
        self.du, self.dstate = rounded(results[0]), results[1]
        self.dh = torch.stack(results[2:], 1)
        out = self.output(*self.scan()[:2])
        (self.dw,) = gradients((out, self.scan()[2][-1]), (self.do, self.dht), (self.w,))

    def kkt(self):
        return scaled_kkt(expand(self.k), self.beta, self.G)

    def scan(self):
        return scan(expand(self.k), self.w, self.u, self.G, self.state)

    def output(self, h, v_new):
        return output(expand(self.q), expand(self.k), v_new, h, self.G)

    def recurrence(self, q=None, k=None):
        q, k = expand(self.q if q is None else q), expand(self.k if k is None else k)
        tensors = (x.split(self.lengths, 1) for x in (q, k, self.v, self.g, self.beta))
        parts = zip(*tensors, self.state.split(1), strict=True)
        out, last = zip(*(recurrence(*part) for part in parts), strict=True)
        return torch.cat(out, 1), torch.cat(last)

    def cu_seqlens(self):
        if len(self.lengths) == 1:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).npu()


def check_formulas(p: Problem) -> None:
    """Check that the chunked formulas equal the recurrence."""
    k, G = expand(p.k), sums(p.g)
    A = inverse(scaled_kkt(k, p.beta, G))
    h, v_new, states = scan(k, *recompute_w_u(k, p.v, p.beta, A, G), G, p.state)
    out, last = p.recurrence()
    torch.testing.assert_close(output(expand(p.q), k, v_new, h, G), out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states[-1], last, rtol=1e-9, atol=1e-9)


# Cases: each function returns {name: (upstream's result, the formula's)}.

CASES: list[tuple[str, str, typing.Callable]] = []


def case(project: str, *names: str):
    def register(function):
        for name in names or (function.__name__.removeprefix(f"{project}_"),):
            CASES.append((project, name, function))
        return function

    return register


def named(names, results, expected):
    return dict(zip(names.split(), zip(results, expected, strict=True), strict=True))
