"""Cases of flash-linear-attention's kernels: gates are log2, q and k have fewer heads than v."""

from __future__ import annotations

import torch
import triton  # noqa: F401  (first: the emulated NPU patches it when it is imported)
from gdn_problem import (
    BATCH,
    CHUNK,
    DIM,
    LN2,
    SCALE,
    TOKENS,
    VALUE_HEADS,
    Problem,
    case,
    conv1d,
    expand,
    gate,
    gradients,
    inverse,
    l2norm,
    named,
    npu,
    npu32,
    recompute_w_u,
    recurrence,
    rms_norm_gated,
    rounded,
    sums,
    tokens,
)


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
    """Compare the inverses without their diagonal, which is 1."""
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
    kept = (A_log, dt_bias)  # these stay fp32
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
    dlast[..., 0] = 0  # upstream stores one token more than it uses, and drops its gradient
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
