"""Runs other projects' Triton-Ascend kernels for Gated Delta Net on the emulated NPU.

python tests/emulator/upstream_gdn.py --fla FLASH_LINEAR_ATTENTION --sgl SGL_KERNEL_NPU

Each argument is a checkout of upstream's repository; no file of it is changed or copied. Every
kernel is called through upstream's own Python function on `npu` tensors, and what it returns is
compared with the plain formula, written below, in fp64 on the CPU from the same rounded inputs. The
formulas of the chunked algorithm are compared with the recurrence over tokens first; gradients are
PyTorch's, of those formulas. The command starts itself again under `npu-ops emulate`.

The exit status is 1 when a kernel does not compile, run and compute what the formula does, unless
it is in KNOWN.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.machinery
import io
import math
import os
import pathlib
import subprocess
import sys
import traceback
import types
import typing

import torch
import torch.nn.functional as F
import triton  # noqa: F401  (first: the emulated NPU joins it as it is imported)

BATCH, TOKENS, HEADS, VALUE_HEADS, DIM, CHUNK = 1, 128, 2, 4, 128, 64
SCALE = DIM**-0.5
LN2 = math.log(2)
# Relative L2 error. bf16 keeps 8 bits, so its own rounding is 1.7e-3; gradients chain several.
TOLERANCE = 1e-2

# What does not work, and why; everything else has to, and these are not expected to.
KNOWN = {
    "sgl recompute_w_u_fwd without cu_seqlens": "the kernel reads a name that it then does not set",
    "sgl fused_sigmoid_gating_delta_rule_update_npu, 4 tokens, no state kept": (
        "the kernel reads the state anew for each token, and there it is 0"
    ),
    "sgl causal_conv1d_update_npu, tokens next to each other": (
        "triton-adapter-opt 3.2.0 stops at an assertion (InterleaveOptimization.cpp)"
    ),
}


# Formulas, in fp64. Tensors are [batch, token, head, ...]; there are as many of q's and k's heads
# as of v's here (`expand`). `G` is the sum of the log gates within each chunk.


def expand(x):
    return x.repeat_interleave(VALUE_HEADS // HEADS, 2)


def chunks(x):
    """[batch, token, head, ...] -> [batch, head, chunk, token in chunk, ...]"""
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def tokens(x):
    return x.movedim(1, 3).flatten(1, 2)


def recurrence(q, k, v, g, beta, state, scale=SCALE):
    """The definition. state: [batch, head, key, value]. Returns outputs and the last state."""
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
    """exp(G_i - G_j) below the diagonal, 0 elsewhere."""
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
    """States before each chunk, new values, and the states before each chunk and after the last."""
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
    """Causal and per channel. x: [batch, token, channel], weight: [channel, width]."""
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
    """One set of inputs and everything that the formulas make of it, in fp64 on the CPU.

    What a later kernel reads of an earlier one is rounded as upstream rounds it.
    """

    def __init__(self, lengths=(TOKENS,), stages=True):
        torch.manual_seed(0)
        self.lengths = list(lengths)
        keys = (BATCH, sum(lengths), HEADS, DIM)
        values = (BATCH, sum(lengths), VALUE_HEADS, DIM)
        states = (len(lengths), VALUE_HEADS, DIM, DIM)

        def leaf(x, dtype=torch.bfloat16):
            return rounded(x, dtype).requires_grad_()

        # Keys that resemble each other: with independent ones the inverse is almost the identity.
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
        # `dh`: with respect to the state after each chunk; `du` is called dv upstream.
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
    """The chunked formulas are the recurrence."""
    k, G = expand(p.k), sums(p.g)
    A = inverse(scaled_kkt(k, p.beta, G))
    h, v_new, states = scan(k, *recompute_w_u(k, p.v, p.beta, A, G), G, p.state)
    out, last = p.recurrence()
    torch.testing.assert_close(output(expand(p.q), k, v_new, h, G), out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states[-1], last, rtol=1e-9, atol=1e-9)


# Cases: each returns {result: (upstream's, the formula's)}

CASES: list[tuple[str, str, typing.Callable]] = []


def case(project: str, *names: str):
    def register(function):
        for name in names or (function.__name__.removeprefix(f"{project}_"),):
            CASES.append((project, name, function))
        return function

    return register


# flash-linear-attention: log gates to base 2, keys and queries with fewer heads


def log2(G):
    return npu32(G / LN2)


@case("fla", "chunk_local_cumsum")
def fla_cumsum(p):
    from fla.ops.utils import chunk_local_cumsum

    up = chunk_local_cumsum(npu32(p.g), chunk_size=CHUNK, scale=1 / LN2)
    down = chunk_local_cumsum(npu32(p.g), chunk_size=CHUNK, reverse=True)
    return {"g": (up, sums(p.g) / LN2), "reversed": (down, sums(p.g, reverse=True))}


@case("fla", "gdn_gate_chunk_cumsum")
def fla_gate_cumsum(p):
    from fla.ops.gated_delta_rule.gate import gdn_gate_chunk_cumsum

    a, A_log, dt_bias = gate_inputs(p)
    result = gdn_gate_chunk_cumsum(
        npu(a), npu32(A_log), chunk_size=CHUNK, scale=1 / LN2, dt_bias=npu32(dt_bias)
    )
    return {"g": (result, sums(gate(a, A_log, dt_bias)) / LN2)}


@case("fla", "gdn_gate_fwd")
def fla_gate(p):
    from fla.ops.gated_delta_rule.gate import gdn_gate_fwd

    a, A_log, dt_bias = gate_inputs(p)
    return {"g": (gdn_gate_fwd(npu(a), npu32(A_log), npu32(dt_bias)), gate(a, A_log, dt_bias))}


@case("fla", "gdn_gate_bwd")
def fla_gate_bwd(p):
    from fla.ops.gated_delta_rule.gate import gdn_gate_bwd

    a, A_log, dt_bias = inputs = [x.requires_grad_() for x in gate_inputs(p)]
    dg = p.do[..., 0]
    expected = gradients(gate(*inputs), dg, inputs)
    results = gdn_gate_bwd(npu(a), npu32(A_log), npu32(dt_bias), npu32(dg))
    return named("da dA_log ddt_bias", results, expected)


def gate_inputs(p):
    a = rounded(torch.randn(p.g.shape))
    A_log = rounded(torch.rand(VALUE_HEADS).log(), torch.float32)
    return a, A_log, rounded(torch.rand(VALUE_HEADS), torch.float32)


@case("fla", "fused_beta_sigmoid")
def fla_beta(p):
    from fla.ops.common.gate import fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd

    b = rounded(torch.randn(p.g.shape)).requires_grad_()
    db = rounded(torch.randn(p.g.shape))
    expected = 2 * b.sigmoid()
    return {
        "beta": (fused_beta_sigmoid_fwd(npu(b), 2.0), expected),
        "db": (fused_beta_sigmoid_bwd(npu(b), npu(db), 2.0), *gradients(expected, db, b)),
    }


@case("fla", "l2norm")
def fla_l2norm(p):
    from fla.modules.l2norm import l2norm_bwd, l2norm_fwd

    x = rounded(torch.randn(p.k.shape)).requires_grad_()
    y, rstd = l2norm_fwd(npu(x))
    expected = l2norm(x)
    dy = rounded(torch.randn(p.k.shape))
    dx = l2norm_bwd(y, rstd, npu(dy))
    return {"y": (y, expected), "dx": (dx, *gradients(expected, dy, x))}


@case("fla", "chunk_scaled_dot_kkt_fwd")
def fla_kkt(p):
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd

    L = chunk_scaled_dot_kkt_fwd(npu(p.k), g=log2(p.G), beta=npu(p.beta), chunk_size=CHUNK)
    return {"A": (L, p.kkt())}


@case("fla", "solve_tril")
def fla_solve_tril(p):
    from fla.ops.utils import solve_tril

    return solved(solve_tril)


def solved(solve_tril):
    """Off the diagonal, which is 1."""
    results = {}
    for size in (16, 32, 64):
        blocks = (torch.rand(BATCH, VALUE_HEADS, TOKENS // size, size, size) / 4).tril(-1)
        L = rounded(tokens(blocks), torch.float32)
        one = tokens(torch.eye(size).expand_as(blocks))
        results[f"{size}x{size}"] = (solve_tril(npu32(L)).cpu() - one, inverse(L) - one)
    return results


@case("fla", "recompute_w_u_fwd")
def fla_w_u(p):
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

    results = recompute_w_u_fwd(npu(p.k), npu(p.v), npu(p.beta), npu(p.A), g=log2(p.G))
    return named("w u", results, recompute_w_u(expand(p.k), p.v, p.beta, p.A, p.G))


@case("fla", "chunk_gated_delta_rule_fwd_h")
def fla_h(p):
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    results = chunk_gated_delta_rule_fwd_h(
        npu(p.k),
        npu(p.w),
        npu(p.u),
        g=log2(p.G),
        initial_state=npu32(p.state),
        output_final_state=True,
        chunk_size=CHUNK,
    )
    h, v_new, states = p.scan()
    return named("h v_new state", results, (h, v_new, states[-1]))


@case("fla", "chunk_fwd_o")
def fla_o(p):
    from fla.ops.common.chunk_o import chunk_fwd_o

    o = chunk_fwd_o(
        npu(p.q), npu(p.k), npu(p.v_new), npu(p.h), g=log2(p.G), scale=SCALE, chunk_size=CHUNK
    )
    return {"o": (o, p.output(p.h, p.v_new))}


@case("fla", "chunk_bwd_dv_local")
def fla_dv_local(p):
    from fla.ops.common.chunk_o import chunk_bwd_dv_local

    dv = chunk_bwd_dv_local(
        npu(p.q), npu(p.k), npu(p.do), g=log2(p.G), scale=SCALE, chunk_size=CHUNK
    )
    return {"dv": (dv, *gradients(p.output(p.h, p.v_new), p.do, p.v_new))}


@case("fla", "chunk_gated_delta_rule_bwd_dhu")
def fla_dhu(p):
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

    (dv,) = gradients(p.output(p.h, p.v_new), p.do, p.v_new)
    results = chunk_gated_delta_rule_bwd_dhu(
        q=npu(p.q),
        k=npu(p.k),
        w=npu(p.w),
        do=npu(p.do),
        dv=npu(dv),
        g=log2(p.G),
        h0=npu32(p.state),
        dht=npu32(p.dht),
        scale=SCALE,
        chunk_size=CHUNK,
    )
    return named("dh dstate dv", results, (p.dh, p.dstate, p.du))


@case("fla", "chunk_bwd_dqkwg")
def fla_dqkwg(p):
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg

    results = chunk_bwd_dqkwg(
        q=npu(p.q),
        k=npu(p.k),
        v=npu(p.v_new),
        w=npu(p.w),
        g=log2(p.G),
        h=npu(p.h),
        dv=npu(p.du),
        do=npu(p.do),
        dh=npu(p.dh),
        scale=SCALE,
        chunk_size=CHUNK,
    )
    h, v_new, states = p.scan()
    expected = gradients((p.output(h, v_new), states[-1]), (p.do, p.dht), (p.q, p.k, p.w, p.G))
    return named("dq dk dw dg", results, expected)


@case("fla", "prepare_wy_repr_bwd")
def fla_wy_bwd(p):
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd

    results = prepare_wy_repr_bwd(
        k=npu(p.k),
        v=npu(p.v),
        beta=npu(p.beta),
        g=log2(p.G),
        A=npu(p.A),
        dw=npu(p.dw),
        du=npu(p.du),
    )
    w, u = recompute_w_u(expand(p.k), p.v, p.beta, inverse(p.kkt()), p.G)
    expected = gradients((w, u), (p.dw, p.du), (p.k, p.v, p.beta, p.G))
    return named("dk dv dbeta dg", results, expected)


def fla_whole(p):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    leaves = (p.q, p.k, p.v, p.g, p.beta, p.state)
    q, k, v, g, beta, state = inputs = [
        npu(x, torch.float32 if x is p.g or x is p.state else torch.bfloat16).requires_grad_()
        for x in leaves
    ]
    o, last = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=p.cu_seqlens()
    )
    results = torch.autograd.grad((o, last), inputs, (npu(p.do), npu32(p.dht)))
    expected = p.recurrence()
    return named(
        "o state dq dk dv dg dbeta dstate",
        (o, last, *results),
        (*expected, *gradients(expected, (p.do, p.dht), leaves)),
    )


@case("fla", "chunk_gated_delta_rule and its backward")
def fla_chunk(p):
    return fla_whole(p)


@case("fla", "the same, 100 tokens")
def fla_ragged(p):
    return fla_whole(Problem([100], stages=False))


@case("fla", "the same, sequences of 100, 3 and 25")
def fla_packed(p):
    return fla_whole(Problem([100, 3, 25], stages=False))


@case("fla", "the same with l2norm, gate and sigmoid, chunks of 32")
def fla_inside(p):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    a, A_log, dt_bias = gate_inputs(p)
    b = rounded(torch.randn(p.g.shape))
    q, k = (rounded(torch.randn(p.q.shape)) for _ in range(2))
    leaves = [x.detach().requires_grad_() for x in (q, k, p.v, a, b, A_log, dt_bias)]
    q, k, v, a, b, A_log, dt_bias = leaves
    kept = (A_log, dt_bias)  # in fp32
    ours = [(npu32(x) if any(x is y for y in kept) else npu(x)).requires_grad_() for x in leaves]
    o, _ = chunk_gated_delta_rule(
        *ours[:5],
        A_log=ours[5],
        dt_bias=ours[6],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        chunk_size=32,
    )
    results = torch.autograd.grad(o, ours, npu(p.do))
    expected, _ = recurrence(
        expand(l2norm(q)),
        expand(l2norm(k)),
        v,
        gate(a, A_log, dt_bias),
        b.sigmoid(),
        torch.zeros(BATCH, VALUE_HEADS, DIM, DIM, dtype=torch.double),
    )
    return named(
        "o dq dk dv da db dA_log ddt_bias",
        (o, *results),
        (expected, *gradients(expected, p.do, leaves)),
    )


@case("fla", "fused_recurrent_gated_delta_rule")
def fla_recurrent(p):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    results = fused_recurrent_gated_delta_rule(
        npu(p.q), npu(p.k), npu(p.v), npu32(p.g), beta=npu(p.beta),
        initial_state=npu32(p.state), output_final_state=True,
    )  # fmt: skip
    return named("o state", results, p.recurrence())


@case("fla", "causal_conv1d")
def fla_conv(p):
    from fla.modules.conv.causal_conv1d import causal_conv1d

    x = rounded(torch.randn(BATCH, TOKENS, 4 * DIM)).requires_grad_()
    weight = rounded(torch.randn(4 * DIM, 4)).requires_grad_()
    dy = rounded(torch.randn(x.shape))
    ours = [npu(x).requires_grad_(), npu(weight).requires_grad_()]
    y, _ = causal_conv1d(ours[0], ours[1], activation="silu")
    results = torch.autograd.grad(y, ours, npu(dy))
    expected = conv1d(x, weight)
    return named("y dx dw", (y, *results), (expected, *gradients(expected, dy, (x, weight))))


@case("fla", "causal_conv1d with state")
def fla_conv_state(p):
    from fla.modules.conv.causal_conv1d import causal_conv1d

    x = rounded(torch.randn(BATCH, TOKENS, 4 * DIM)).requires_grad_()
    weight, bias = (rounded(torch.randn(4 * DIM, *s)).requires_grad_() for s in ((4,), ()))
    state = rounded(torch.randn(BATCH, 4 * DIM, 4)).requires_grad_()
    leaves = (x, weight, bias, state)
    dy, dlast = rounded(torch.randn(x.shape)), rounded(torch.randn(state.shape))
    dlast[..., 0] = 0  # upstream keeps one token more than it ever uses, and drops its gradient
    ours = [npu(leaf).requires_grad_() for leaf in leaves]
    y, last = causal_conv1d(
        *ours[:3], initial_state=ours[3], output_final_state=True, activation="silu"
    )
    results = torch.autograd.grad((y, last), ours, (npu(dy), npu(dlast)))
    expected = conv1d(x, weight, state.mT[:, 1:], bias), x[:, -4:].mT
    return named(
        "y state dx dw db dstate",
        (y, last, *results),
        (*expected, *gradients(expected, (dy, dlast), leaves)),
    )


@case("fla", "causal_conv1d, sequences of 100, 3 and 25")
def fla_conv_packed(p):
    from fla.modules.conv.causal_conv1d import causal_conv1d

    lengths = [100, 3, 25]
    x = rounded(torch.randn(BATCH, TOKENS, 4 * DIM)).requires_grad_()
    weight = rounded(torch.randn(4 * DIM, 4)).requires_grad_()
    dy = rounded(torch.randn(x.shape))
    ours = [npu(x).requires_grad_(), npu(weight).requires_grad_()]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).npu()
    y, _ = causal_conv1d(*ours, activation="silu", cu_seqlens=cu_seqlens)
    results = torch.autograd.grad(y, ours, npu(dy))
    expected = torch.cat([conv1d(part, weight) for part in x.split(lengths, 1)], 1)
    return named("y dx dw", (y, *results), (expected, *gradients(expected, dy, (x, weight))))


@case("fla", "causal_conv1d_update")
def fla_conv_update(p):
    from fla.modules.conv.triton.ops import causal_conv1d_update

    x = rounded(torch.randn(2, 1, 4 * DIM))
    weight, bias = (rounded(torch.randn(4 * DIM, *s)) for s in ((4,), ()))
    state = rounded(torch.randn(2, 4 * DIM, 4))
    results = causal_conv1d_update(
        npu(x), npu(state), weight=npu(weight), bias=npu(bias), activation="silu"
    )
    after = torch.cat([state[..., 1:], x.mT], -1)
    return named("y state", results, (conv1d(x, weight, state.mT[:, 1:], bias), after))


@case("fla", "rms_norm_gated")
def fla_norm(p):
    from fla.modules.fused_norm_gate import rms_norm_gated as upstream

    inputs = [rounded(torch.randn(s)).requires_grad_() for s in (p.v.shape, p.v.shape, (DIM,))]
    dy = rounded(torch.randn(p.v.shape))
    ours = [npu(x).requires_grad_() for x in inputs]
    x, z, weight = ours
    y = upstream(x, z, weight, None, activation="swish", eps=1e-5)
    results = torch.autograd.grad(y, ours, npu(dy))
    expected = rms_norm_gated(*inputs)
    return named("y dx dz dw", (y, *results), (expected, *gradients(expected, dy, inputs)))


# sgl-kernel-npu: natural logarithms


@case("sgl", "chunk_local_cumsum")
def sgl_cumsum(p):
    from sgl_kernel_npu.fla.cumsum import chunk_local_cumsum

    return {"g": (chunk_local_cumsum(npu32(p.g), chunk_size=CHUNK), sums(p.g))}


@case("sgl", "chunk_scaled_dot_kkt_fwd")
def sgl_kkt(p):
    from sgl_kernel_npu.fla.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd_npu

    L = chunk_scaled_dot_kkt_fwd_npu(npu(p.k), npu(p.beta), g_cumsum=npu32(p.G))
    return {"A": (L, p.kkt())}


@case("sgl", "solve_tril")
def sgl_solve_tril(p):
    from sgl_kernel_npu.fla.solve_tril import solve_tril_npu

    return solved(solve_tril_npu)


def sgl_w_u(p, cu_seqlens):
    from sgl_kernel_npu.fla.wy_fast import recompute_w_u_fwd_npu

    results = recompute_w_u_fwd_npu(
        npu(p.k), npu(p.v), npu(p.beta), npu32(p.G), npu(p.A), cu_seqlens
    )
    return named("w u", results, recompute_w_u(expand(p.k), p.v, p.beta, p.A, p.G))


@case("sgl", "recompute_w_u_fwd")
def sgl_w_u_packed(p):
    return sgl_w_u(p, torch.tensor([0, TOKENS]).npu())


@case("sgl", "recompute_w_u_fwd without cu_seqlens")
def sgl_w_u_dense(p):
    return sgl_w_u(p, None)


@case("sgl", "chunk_gated_delta_rule_fwd_h")
def sgl_h(p):
    from sgl_kernel_npu.fla.chunk_delta_h import chunk_gated_delta_rule_fwd_h_npu

    results = chunk_gated_delta_rule_fwd_h_npu(
        npu(p.k), npu(p.w), npu(p.u), g=npu32(p.G), initial_state=npu32(p.state),
        output_final_state=True,
    )  # fmt: skip
    h, v_new, states = p.scan()
    return named("h v_new state", results, (h, v_new, states[-1]))


@case("sgl", "chunk_fwd_o")
def sgl_o(p):
    from sgl_kernel_npu.fla.chunk_o import chunk_fwd_o_npu

    o = chunk_fwd_o_npu(npu(p.q), npu(p.k), npu(p.v_new), npu(p.h), g=npu32(p.G), scale=SCALE)
    return {"o": (o, p.output(p.h, p.v_new))}


def sgl_whole(p):
    from sgl_kernel_npu.fla.chunk import chunk_gated_delta_rule_npu

    q, k = (rounded(torch.randn(x.shape)) for x in (p.q, p.k))
    results = chunk_gated_delta_rule_npu(
        npu(q),
        npu(k),
        npu(p.v),
        npu32(p.g),
        npu(p.beta),
        initial_state=npu32(p.state),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, *p.lengths]).cumsum(0).npu(),
    )
    return named("o state", results[:2], p.recurrence(l2norm(q), l2norm(k)))


@case("sgl", "chunk_gated_delta_rule_npu")
def sgl_chunk(p):
    return sgl_whole(p)


@case("sgl", "the same, sequences of 100, 3 and 25")
def sgl_packed(p):
    return sgl_whole(Problem([100, 3, 25], stages=False))


@case("sgl", "l2norm_fwd")
def sgl_l2norm(p):
    from sgl_kernel_npu.fla.l2norm import l2norm_fwd

    x = rounded(torch.randn(p.k.shape))
    return {"y": (l2norm_fwd(npu(x)), l2norm(x))}


def sgl_gating_inputs(p):
    a, A_log, dt_bias = gate_inputs(p)
    return A_log, a.flatten(0, 1), rounded(torch.randn(TOKENS, VALUE_HEADS)), dt_bias


@case("sgl", "fused_gdn_gating")
def sgl_gating(p):
    from sgl_kernel_npu.fla.fused_gdn_gating import fused_gdn_gating_npu

    A_log, a, b, dt_bias = sgl_gating_inputs(p)
    g, beta = fused_gdn_gating_npu(npu32(A_log), npu(a), npu(b), npu32(dt_bias))
    return {"g": (g, gate(a, A_log, dt_bias)), "beta": (beta, b.sigmoid())}


@case("sgl", "fused_gdn_gating_kernel_without_sigmoid")
def sgl_gating_without(p):
    from sgl_kernel_npu.fla.fused_gdn_gating import fused_gdn_gating_kernel_without_sigmoid

    A_log, a, b, dt_bias = sgl_gating_inputs(p)
    results = fused_gdn_gating_kernel_without_sigmoid(npu32(A_log), npu(a), npu(b), npu32(dt_bias))
    return {"g": (results[0], gate(a, A_log, dt_bias))}


def sgl_recurrent(length, kept=True):
    from sgl_kernel_npu.fla import fused_sigmoid_gating_recurrent as module

    batch, pool = 2, 5
    q, k = (rounded(torch.randn(batch, length, HEADS, DIM)) for _ in range(2))
    v = rounded(torch.randn(batch, length, VALUE_HEADS, DIM))
    a, b = (rounded(torch.randn(batch, length, VALUE_HEADS)) for _ in range(2))
    A_log = rounded(torch.rand(VALUE_HEADS).log(), torch.float32)
    dt_bias = rounded(torch.rand(VALUE_HEADS), torch.float32)
    states = rounded(torch.randn(pool, VALUE_HEADS, DIM, DIM) / 4, torch.float32)
    where = torch.tensor([3, 1])
    indices = where if kept else torch.tensor([-1, -1])
    ours = npu32(states)
    o = module.fused_sigmoid_gating_delta_rule_update_npu(
        A_log=npu32(A_log), a=npu(a), dt_bias=npu32(dt_bias), softplus_beta=1.0,
        softplus_threshold=20.0, q=npu(q), k=npu(k), v=npu(v), b=npu(b),
        initial_state_source=ours, initial_state_indices=indices.int().npu(),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    expected, last = recurrence(
        expand(l2norm(q)),
        expand(l2norm(k)),
        v,
        gate(a, A_log, dt_bias),
        b.sigmoid(),
        states[where] if kept else torch.zeros_like(states[where]),
    )
    if not kept:
        return {"o": (o, expected), "other states": (ours, states)}
    return {"o": (o, expected), **pool_results(ours, states, where, last)}


def pool_results(ours, states, where, expected):
    """What a kernel made of a pool of states: of those it was told of, and of the others."""
    others = torch.ones(len(states), dtype=torch.bool).index_fill(0, where, False)
    ours = ours.cpu()
    return {"state": (ours[where], expected), "other states": (ours[others], states[others])}


@case("sgl", "fused_sigmoid_gating_delta_rule_update_npu")
def sgl_decode(p):
    return sgl_recurrent(1)


@case("sgl", "the same, 4 tokens")
def sgl_decode_4(p):
    return sgl_recurrent(4)


@case("sgl", "fused_sigmoid_gating_delta_rule_update_npu, 4 tokens, no state kept")
def sgl_decode_stateless(p):
    return sgl_recurrent(4, kept=False)


def sgl_norm(name):
    from sgl_kernel_npu.fla import layernorm_gated

    x, z = (rounded(torch.randn(TOKENS * VALUE_HEADS, DIM)) for _ in range(2))
    weight = rounded(torch.randn(DIM))
    function = getattr(layernorm_gated, name)
    y = function(npu(x), npu(weight), None, 1e-5, z=npu(z), is_rms_norm=True)[0]
    return {"y": (y, rms_norm_gated(x, z, weight))}


@case("sgl")
def sgl_layer_norm_fwd_npu(p):
    return sgl_norm("layer_norm_fwd_npu")


@case("sgl")
def sgl_layer_norm_fwd_npu_simd(p):
    return sgl_norm("layer_norm_fwd_npu_simd")


@case("sgl", "causal_conv1d_update_v2")
def sgl_conv_v2(p):
    from sgl_kernel_npu.mamba.causal_conv1d import causal_conv1d_update_v2

    channels, pool = 4 * DIM, 5
    x = rounded(torch.randn(2, channels))
    weight, bias = rounded(torch.randn(channels, 4)), rounded(torch.randn(channels))
    states = rounded(torch.randn(pool, 3, channels))
    where = torch.tensor([3, 1])
    ours = npu(states)
    y = causal_conv1d_update_v2(
        npu(x), ours, npu(weight.T), npu(bias), "silu", conv_state_indices=where.int().npu()
    )
    expected = conv1d(x[:, None], weight, states[where], bias)[:, 0]
    after = torch.cat([states[where][:, 1:], x[:, None]], 1)
    return {"y": (y, expected), **pool_results(ours, states, where, after)}


def sgl_conv_update(lay_out):
    from sgl_kernel_npu.mamba.causal_conv1d import causal_conv1d_update_npu

    channels, pool, length = 4 * DIM, 5, 2
    x = rounded(torch.randn(2, length, channels))
    weight, bias = rounded(torch.randn(channels, 4)), rounded(torch.randn(channels))
    states = rounded(torch.randn(pool, 3 + length - 1, channels))
    where = torch.tensor([3, 1])
    accepted = torch.tensor([1, 2])
    ours = npu(states).mT
    y = causal_conv1d_update_npu(
        lay_out(npu(x).mT), ours, npu(weight), npu(bias), "silu",
        conv_state_indices=where.int().npu(), num_accepted_tokens=accepted.int().npu(),
    )  # fmt: skip
    # The window before the tokens starts after those of the last step that were not accepted.
    before = torch.stack([states[w, n - 1 : n + 2] for w, n in zip(where, accepted, strict=True)])
    expected = conv1d(x, weight, before, bias)
    after = torch.cat([before[:, 1:], x], 1)
    return {"y": (y.mT, expected), **pool_results(ours.mT, states, where, after)}


@case("sgl", "causal_conv1d_update_npu")
def sgl_conv_update_channels(p):
    return sgl_conv_update(lambda x: x)


@case("sgl", "causal_conv1d_update_npu, tokens next to each other")
def sgl_conv_update_tokens(p):
    return sgl_conv_update(torch.Tensor.contiguous)


@case("sgl", "causal_conv1d_linear_verify_npu")
def sgl_conv_verify(p):
    from sgl_kernel_npu.mamba.causal_conv1d_verify import causal_conv1d_linear_verify_npu

    channels, pool, steps = 4 * DIM, 5, 3
    x = rounded(torch.randn(2, steps, channels))
    weight, bias = rounded(torch.randn(channels, 4)), rounded(torch.randn(channels))
    states = rounded(torch.randn(pool, 3, channels))
    where, scratch = torch.tensor([3, 1]), torch.tensor([1, 0])
    ours, windows = npu(states.mT), npu(torch.zeros(2, steps, channels, 3))
    y = causal_conv1d_linear_verify_npu(
        npu(x.mT), ours, npu(weight), npu(bias), where.int().npu(), windows,
        scratch.int().npu(), update_persistent_state=True,
    )  # fmt: skip
    tokens_seen = torch.cat([states[where], x], 1)
    seen = torch.stack([tokens_seen[:, t : t + 3].mT for t in range(1, steps + 1)], 1)
    return {
        "y": (y.mT, conv1d(x, weight, states[where], bias)),
        "windows": (windows.cpu()[scratch], seen),
        **pool_results(ours.mT, states, where, tokens_seen[:, -3:]),
    }


@case("sgl", "speculative_state_scatter_npu")
def sgl_scatter(p):
    from sgl_kernel_npu.mamba.speculative_state_scatter import speculative_state_scatter_npu

    source = rounded(torch.randn(2, 3, 4, VALUE_HEADS, DIM, DIM))
    states = rounded(torch.randn(2, 5, VALUE_HEADS, DIM, DIM))
    where, scratch, step = ([3, 1, -1], [2, 0, 1], [1, 3, 2])
    ours = npu(states)
    indices = (torch.tensor(x).int().npu() for x in (where, scratch, step))
    speculative_state_scatter_npu(ours, npu(source), *indices)
    expected = states.clone()
    for a, b, c in zip(where[:2], scratch, step, strict=False):  # -1: none
        expected[:, a] = source[:, b, c]
    return {"states": (ours, expected)}


@case("sgl", "fused_qkvzba_split_reshape_cat")
def sgl_split(p):
    from sgl_kernel_npu.fla.utils import fused_qkvzba_split_reshape_cat

    _, _, parts = split_inputs()
    # Interleaved: of each key head in turn its q, k, v and z, or its b and a.
    grouped = [x.unflatten(1, (HEADS, -1)) for x in parts]
    qkvz = torch.cat(grouped[:4], -1).flatten(1)
    ba = torch.cat(grouped[4:], -1).flatten(1)
    return split_results(fused_qkvzba_split_reshape_cat, qkvz, ba, parts)


@case("sgl", "fused_qkvzba_split_reshape_cat_contiguous")
def sgl_split_contiguous(p):
    from sgl_kernel_npu.fla.utils import fused_qkvzba_split_reshape_cat_contiguous

    return split_results(fused_qkvzba_split_reshape_cat_contiguous, *split_inputs())


def split_inputs():
    widths = (HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM, VALUE_HEADS * DIM)
    parts = [rounded(torch.randn(TOKENS, n)) for n in (*widths, VALUE_HEADS, VALUE_HEADS)]
    return torch.cat(parts[:4], 1), torch.cat(parts[4:], 1), parts


def split_results(function, qkvz, ba, parts):
    results = function(npu(qkvz), npu(ba), HEADS, VALUE_HEADS, DIM, DIM)
    q, k, v, z, b, a = parts
    return named("qkv z b a", results, (torch.cat([q, k, v], 1), z, b, a))


# Running


def named(names, results, expected):
    return dict(zip(names.split(), zip(results, expected, strict=True), strict=True))


@dataclasses.dataclass
class Row:
    project: str
    name: str
    kernels: list[str]
    compiles: bool
    runs: bool
    text: str
    right: bool

    def __str__(self):
        yes = ("no", "yes")
        kernels = ", ".join(f"`{k}`" for k in self.kernels) or "none"
        return (
            f"| {self.project} | {self.name} | {kernels} | {yes[self.compiles]} | "
            f"{yes[self.runs]} | {self.text} |"
        )


def error(result, expected):
    result, expected = result.detach().cpu().double(), expected.detach()
    result = result.reshape(expected.shape)
    return ((result - expected).norm() / expected.norm()).item()


def run_case(project, name, function, problem, verbose) -> Row:
    from npu_ops_emulator import triton_driver

    triton_driver.reset_statistics()
    torch.manual_seed(1)
    noise = io.StringIO()
    row = Row(project, name, [], True, True, "", True)
    try:
        with contextlib.redirect_stdout(noise):
            errors = {what: error(*pair) for what, pair in function(problem).items()}
        row.right = all(e < TOLERANCE for e in errors.values())  # False for NaN
        row.text = ", ".join(f"{what} {e:.1e}" for what, e in errors.items())
        if not row.right:
            row.text = f"WRONG: {row.text}"
    except Exception as failure:
        if verbose:
            traceback.print_exc()
        row.right = row.runs = False
        row.compiles = "cannot be executed here" in str(failure)
        row.text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    row.kernels = sorted(triton_driver.statistics())
    return row


def import_from(fla: pathlib.Path | None, sgl: pathlib.Path | None) -> None:
    if fla:
        sys.path.insert(0, str(fla))
    if sgl:
        # Its __init__ loads a library of AscendC operators that is built with CANN.
        package = types.ModuleType("sgl_kernel_npu")
        package.__path__ = [str(sgl / "python" / "sgl_kernel_npu" / "sgl_kernel_npu")]
        package.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel_npu", None, is_package=True)
        sys.modules["sgl_kernel_npu"] = package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fla", type=pathlib.Path, help="flash-linear-attention's checkout")
    parser.add_argument("--sgl", type=pathlib.Path, help="sgl-kernel-npu's checkout")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("-v", "--verbose", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    if os.environ.get("NPU_OPS_EMULATOR") != "1":
        os.environ["NPU_OPS_DISABLE"] = "all"  # fla's functions, not ours in their place
        command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, *sys.argv]
        return subprocess.run(command, check=False).returncode
    import_from(options.fla, options.sgl)
    problem = Problem()
    check_formulas(problem)
    print("| project | function | Triton kernels | compiles | runs | relative L2 error |")
    print("|---|---|---|---|---|---|")
    failed = []
    for project, name, function in CASES:
        if getattr(options, project) and options.only in f"{project} {name}":
            row = run_case(project, name, function, problem, options.verbose)
            known = KNOWN.get(f"{project} {name}")
            if known and not row.right:
                row.text = f"{known}; {row.text}"
            if row.right == bool(known):
                failed.append(f"{project} {name}")
            print(row, flush=True)
    if failed:
        print(f"\nnot as expected: {'; '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
