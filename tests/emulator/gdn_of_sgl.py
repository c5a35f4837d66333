"""Cases of sgl-kernel-npu's kernels: gates are natural logarithms."""

from __future__ import annotations

import torch
import triton  # noqa: F401  (first: the emulated NPU patches it when it is imported)
from gdn_of_fla import gate_inputs, solved
from gdn_problem import (
    CHUNK,
    DIM,
    HEADS,
    SCALE,
    TOKENS,
    VALUE_HEADS,
    Problem,
    case,
    conv1d,
    expand,
    gate,
    l2norm,
    named,
    npu,
    npu32,
    recompute_w_u,
    recurrence,
    rms_norm_gated,
    rounded,
    sums,
)


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
    """Return pairs to compare: the pool's slots that the kernel was given, and the others."""
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
    # The window before the tokens starts after the accepted tokens of the last step.
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
    # Interleaved: q, k, v and z of each key head in turn, or its b and a.
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
