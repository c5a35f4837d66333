"""Invariance: the bits of a token's output depend on its own sequence alone.

They do not depend on the batch, its order, packing, padding, pool slots or cuts of a prompt.
docs/invariance.md lists what is promised; each section below is a row of its table.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import forced, implementations, named, on_device
from test_lengths import NAMES, PACKED, alone, rows_of, starts

import npu_ops
from npu_ops.core import cases, env
from npu_ops.core.registry import Table

DTYPES = (torch.float32, torch.bfloat16)
# Arguments that stay in fp32 beside bf16 tokens, as in the models.
WIDE = {"g", "gv", "beta", "state", "A_log", "dt_bias", "cos", "sin", "freqs",
        "cos_sin_cache", "sinks"}  # fmt: skip
LENGTHS = (3, 64, 1, 0, 129, 70)


def narrow(call, dtype):
    """Return the call with its tokens in `dtype`."""
    return {
        n: x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and n not in WIDE
        and not ("beta" in call and n == "initial_state")
        else x
        for n, x in call.items()
    }  # fmt: skip


def outputs_of(function, call, device):
    """Return all outputs on the host. Arguments are cloned, as some functions write to them."""
    call = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    found = function(**on_device(call, device))
    found = found if isinstance(found, tuple) else (found,)
    return [x.cpu() for x in found if x is not None]


def assert_same_bits(actual, expected, what):
    assert torch.equal(actual, expected), (
        f"{what}: {(actual != expected).sum()} of {actual.numel()} elements differ, "
        f"by up to {(actual.float() - expected.float()).abs().max():.1e}"
    )


def by_implementation(ways, op):
    """Yield each call with every kernel whose invariance is promised, and its device."""
    for way in ways:
        for chosen in implementations(Table.tables[op(way)]):
            # Invariance is promised neither for the vendor's operators nor for PyTorch's matrix
            # products. Attention on CPUs uses these products for prompts.
            of_torch = op(way) == "attention" and chosen.values[0] == "cpu"
            if chosen.values[0] not in ("aclnn", "reference") and not of_torch:
                name = f"{way}-{'-'.join(chosen.values)}"
                yield pytest.param(way, *chosen.values, id=name, marks=chosen.marks)


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=named)


# Packed sequences


# rope is tested by rows, below. Calls with raw betas are left out: they use PyTorch's sigmoid. Its
# CPU kernel rounds the elements past the last whole vector differently.
SEQUENCES = [
    packed
    for packed in PACKED
    if packed.op != "rope" and "use_beta_sigmoid_in_kernel" not in packed.call()
]
every_sequence = pytest.mark.parametrize(
    "packed, implementation, device", [*by_implementation(SEQUENCES, lambda packed: packed.op)]
)


def shuffled(packed, call, lengths, order):
    """Return the call with its sequences in another order."""
    begins = [sum(lengths[:n]) for n in range(len(lengths))]
    moved = dict(call)
    for name in packed.tokens:
        times = 2 if name in packed.keys else 1
        parts = [
            call[name].narrow(packed.axis, begins[n] * times, lengths[n] * times) for n in order
        ]
        moved[name] = torch.cat(parts, packed.axis)
    for name, x in call.items():
        if name in ("initial_state", "conv_state", "state") and x is not None:
            moved[name] = x[list(order)]
        elif name in (*NAMES, "cu_seqlens_k"):
            times = 2 if name == "cu_seqlens_k" else 1
            moved[name] = starts([lengths[n] * times for n in order], torch.int64)
    return moved


@every_sequence
@every_dtype
def test_a_packed_sequence_is_as_alone(packed, implementation, device, dtype):
    """Neither the order, int32 or int64 `cu_seqlens`, nor tokens of no sequence change a bit."""
    total = sum(LENGTHS)
    call = narrow(packed.call(total, LENGTHS), dtype)
    behind = narrow(packed.call(total + 5, LENGTHS), dtype)
    for name in packed.tokens:
        times = 2 if name in packed.keys else 1
        behind[name].narrow(packed.axis, 0, total * times).copy_(call[name])
    behind |= {n: x for n, x in call.items() if n not in packed.tokens}
    order = (4, 2, 5, 3, 0, 1)
    with torch.no_grad(), forced(implementation, packed.op):
        whole = outputs_of(packed.function, call, device)
        more = outputs_of(packed.function, behind, device)
        moved = outputs_of(packed.function, shuffled(packed, call, LENGTHS, order), device)
        at = 0
        for n in order:
            begin, length = sum(LENGTHS[:n]), LENGTHS[n]
            if length:
                one = alone(packed, call, n, begin, length, LENGTHS)
                few = outputs_of(packed.function, one, device)
            for i, x in enumerate(whole):
                part = rows_of(packed, i, x)[begin : begin + length]
                assert_same_bits(
                    rows_of(packed, i, more[i])[begin : begin + length], part, "behind"
                )
                assert_same_bits(rows_of(packed, i, moved[i])[at : at + length], part, "order")
                if length:
                    assert_same_bits(rows_of(packed, i, few[i]), part, f"sequence {n} alone")
            at += length


@every_sequence
@given(lengths=st.lists(st.integers(0, 140), min_size=2, max_size=5))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_sequence_is_as_alone_whatever_lengths_are_beside_it(
    packed, implementation, device, lengths
):
    lengths = tuple(lengths)
    call = narrow(packed.call(sum(lengths), lengths), torch.bfloat16)
    with torch.no_grad(), forced(implementation, packed.op):
        whole = outputs_of(packed.function, call, device)
        for n, length in enumerate(lengths):
            if not length:
                continue
            begin = sum(lengths[:n])
            one = alone(packed, call, n, begin, length, lengths)
            for i, x in enumerate(outputs_of(packed.function, one, device)):
                part = rows_of(packed, i, whole[i])[begin : begin + length]
                assert_same_bits(rows_of(packed, i, x), part, f"sequence {n} alone")


# Rows


ROWS = {  # function: its op, arguments with one row per token, and a function that draws all
    "l2norm": ("l2norm", ("x",), lambda t, draw: {"x": draw(t, 3, 128)}),
    "rms_norm_gated": ("rms_norm_gated", ("x", "z"), lambda t, draw: {
        "x": draw(t, 3, 128), "z": draw(t, 3, 128), "weight": draw(128)}),
    "gdn_gate": ("gdn_gate", ("a", "b"), lambda t, draw: {
        "a": draw(t, 6), "b": draw(t, 6), "A_log": draw(6), "dt_bias": draw(6)}),
    "bias_dropout_add": ("bias_dropout_add", ("x", "residual"), lambda t, draw: {
        "x": draw(t, 1, 130), "residual": draw(t, 1, 130), "bias": draw(130), "p": 0.0,
        "training": False}),
    "apply_rotary_pos_emb": ("rope", ("q", "k", "cos", "sin"), lambda t, draw: {
        "q": draw(t, 4, 128), "k": draw(t, 2, 128), "cos": draw(t, 64), "sin": draw(t, 64),
        "layout": "TND", "rotary_dim": 128}),
    "qk_norm_rope": ("qk_norm_rope", ("qkv", "cos", "sin"), lambda t, draw: {
        "qkv": draw(t, 8 * 64), "q_weight": draw(64), "k_weight": draw(64), "num_heads": 4,
        "num_kv_heads": 2, "cos": draw(t, 32), "sin": draw(t, 32), "rotary_dim": 64}),
}  # fmt: skip
every_row = pytest.mark.parametrize(
    "name, implementation, device", [*by_implementation(ROWS, lambda name: ROWS[name][0])]
)


@every_row
@every_dtype
def test_a_row_is_as_alone(name, implementation, device, dtype):
    """A row keeps its bits alone, in any order, and beside rows of NaN."""
    op, rows, make = ROWS[name]
    draw = torch.Generator().manual_seed(0)
    count = 131
    call = narrow(make(count, lambda *shape: torch.randn(*shape, generator=draw)), dtype)
    function = getattr(npu_ops, name)

    def of(chosen, beside=False):
        few = {n: call[n][chosen].clone() for n in rows}
        if beside:  # every second row is NaN
            few = {n: torch.stack((x, torch.full_like(x, math.nan)), 1).flatten(0, 1)
                   for n, x in few.items()}  # fmt: skip
        return outputs_of(function, call | few, device)

    with torch.no_grad(), forced(implementation, op):
        whole = outputs_of(function, call, device)
        order = torch.randperm(count, generator=draw)
        parts = {"order": order, "one": torch.tensor([77]), "some": torch.arange(60, 67)}
        for what, chosen in parts.items():
            for i, x in enumerate(of(chosen)):
                assert_same_bits(x, whole[i][chosen], what)
        for i, x in enumerate(of(order, beside=True)):
            assert_same_bits(x[::2], whole[i][order], "beside NaN")


# Multimodal rotary embedding: cos and sin are [3, T, D], tokens second


@pytest.mark.parametrize("implementation, device", implementations(Table.tables["mrope"]))
@every_dtype
def test_a_row_of_three_axes_is_as_alone(implementation, device, dtype):
    (case,) = [case for case in cases.of("mrope").CASES if case.name == "qwen3-vl-8b-tp1-t64"]
    call = case.inputs(dtype)
    assert call["layout"] == "TND" and call["cos"].shape[1] == 64
    with forced(implementation, "mrope"):
        whole = outputs_of(npu_ops.apply_multimodal_rotary_pos_emb, call, device)
        few = call | {n: call[n][20:23] for n in "qk"}
        few |= {n: call[n][:, 20:23] for n in ("cos", "sin")}
        for x, y in zip(outputs_of(npu_ops.apply_multimodal_rotary_pos_emb, few, device), whole,
                        strict=True):  # fmt: skip
            assert_same_bits(x, y[20:23], "three of 64")


# Prompts cut into parts, or with a prefix from a cache


def delta_call(tokens, dtype, function):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    norm = torch.nn.functional.normalize
    call = {
        "q": norm(normal(1, tokens, 2, 64), dim=-1).to(dtype),
        "k": norm(normal(1, tokens, 2, 64), dim=-1).to(dtype),
        "v": normal(1, tokens, 4, 64).to(dtype), "g": -normal(1, tokens, 4).abs(),
        "beta": normal(1, tokens, 4).sigmoid(), "output_final_state": True,
    }  # fmt: skip
    return function, call, ("q", "k", "v", "g", "beta"), 1


def kda_call(tokens, dtype, function):
    function, call, *rest = delta_call(tokens, dtype, function)
    return function, call | {"g": call["g"][..., None] * torch.linspace(0.1, 2, 64)}, *rest


def conv_call(tokens, dtype, function, **more):
    draw = torch.Generator().manual_seed(0)
    channels = 2 * 2 * 16 + 2 * 16
    call = {
        "x": torch.randn(1, tokens, channels, generator=draw).to(dtype),
        "weight": torch.randn(channels, 4, generator=draw).to(dtype),
        "activation": "silu", "output_final_state": True,
    }  # fmt: skip
    return function, call | more, ("x",), 1


_HEADS = {"num_k_heads": 2, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 16}
CUT = {
    "fused_recurrent_gated_delta_rule": (delta_call, {}, range(1, 200, 33)),
    "chunk_gated_delta_rule": (delta_call, {}, (64, 128, 192)),
    "chunk_kda": (kda_call, {}, (64, 128, 192)),
    "causal_conv1d": (conv_call, {}, (1, 2, 3, 64, 100)),
    "causal_conv1d_qkv": (conv_call, _HEADS, (1, 2, 3, 64, 100)),
}


@pytest.mark.parametrize(
    "name, implementation, device", [*by_implementation(CUT, lambda name: name)]
)
@every_dtype
def test_a_prompt_that_is_cut_is_as_uncut(name, implementation, device, dtype):
    """Outputs and final state have the same bits; the state is passed on in its own dtype."""
    make, more, cuts = CUT[name]
    function, call, tokens, axis = make(200, dtype, getattr(npu_ops, name), **more)

    def part(begin, end, state):
        cut = {n: x.narrow(axis, begin, end - begin) if n in tokens else x for n, x in call.items()}
        return outputs_of(function, cut | {"initial_state": state}, device)

    with torch.no_grad(), forced(implementation, name):
        *whole, state = part(0, 200, None)
        for cut in cuts:
            *first, between = part(0, cut, None)
            *second, after = part(cut, 200, between)
            for x, y, z in zip(first, second, whole, strict=True):
                assert_same_bits(torch.cat((x, y), axis), z, f"cut at {cut}")
            assert_same_bits(after, state, f"state after a cut at {cut}")


@pytest.mark.parametrize(
    "name, implementation, device", [*by_implementation(["attention"], lambda name: name)]
)
@every_dtype
def test_attention_to_a_prompt_that_is_cut(name, implementation, device, dtype):
    """The later tokens of a prompt are computed with all keys, as after a prefix from a cache."""
    q, k, v = qkv(150, dtype)
    with torch.no_grad(), forced(implementation, name):
        (whole,) = outputs_of(
            npu_ops.attention, {"q": q, "k": k, "v": v, "is_causal": True}, device
        )
        for cut in (1, 63, 64, 100, 149):
            later = {"q": q[:, cut:], "k": k, "v": v, "is_causal": True}
            (part,) = outputs_of(npu_ops.attention, later, device)
            assert_same_bits(part, whole[:, cut:], f"cut at {cut}")


def qkv(tokens, dtype):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, n, 64, generator=draw).to(dtype) for n in (4, 2, 2)]


# Batched decoding


def decoding_calls():
    """Return, by function: arguments, names of token arguments, pool, index argument, settings."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    count, slots = 9, 12
    conv = {"x": normal(count, 96), "conv_state": normal(slots, 96, 3), "weight": normal(96, 4),
            "activation": "silu"}  # fmt: skip
    rule = {
        "qkv": normal(count, (2 + 2 + 4) * 64), "a": normal(count, 4), "b": normal(count, 4),
        "A_log": normal(4), "dt_bias": normal(4), "state": normal(slots, 4, 64, 64),
    }  # fmt: skip
    return {
        "causal_conv1d_update": (conv, ("x",), "conv_state", "conv_state_indices", {}),
        "gated_delta_rule_update": (
            rule, ("qkv", "a", "b"), "state", "state_indices", {"state_v_first": True},
        ),
    }  # fmt: skip


DECODING = decoding_calls()


@pytest.mark.parametrize(
    "name, implementation, device", [*by_implementation(DECODING, lambda name: name)]
)
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda dtype: f"pool-{named(dtype)}")
def test_a_sequence_decodes_as_alone(name, implementation, device, pool_dtype):
    """A sequence's bits do not depend on slot, neighbours, padding rows or the rest of the pool."""
    call, tokens, pool, indices, more = DECODING[name]
    # conv states are rows of x, so x has their dtype
    dtype = pool_dtype if pool == "conv_state" else torch.bfloat16
    call = narrow(call, dtype) | {pool: call[pool].to(pool_dtype)} | more
    function, count = getattr(npu_ops, name), call[tokens[0]].shape[0]
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7]

    def decode(chosen, places, rest=None):
        """Return outputs and states of some sequences, placed in a pool whose other
        slots are NaN."""
        states = torch.full_like(call[pool], math.nan)
        for n, place in zip(chosen, places, strict=True):
            states[place] = call[pool][order[n]]
        given = {n: call[n][chosen] for n in tokens}
        slots = torch.tensor(places, dtype=torch.int32)
        if rest:  # padding rows, as in a captured graph
            given = {
                n: torch.cat((x, torch.full_like(x[:rest], math.nan))) for n, x in given.items()
            }
            slots = torch.cat((slots, torch.full((rest,), -1, dtype=torch.int32)))
        states = states.to(device)
        arguments = on_device(call | given | {indices: slots}, device) | {pool: states}
        out = function(**arguments)
        return out.cpu()[: len(chosen)], states.cpu()[list(places)]

    everyone = list(range(count))
    with torch.no_grad(), forced(implementation, name):
        together, states = decode(everyone, order)
        elsewhere = list(itertools.islice(range(11, -1, -1), count))
        for other in (decode(everyone, elsewhere), decode(everyone, order, rest=3)):
            assert_same_bits(other[0], together, "in other slots, or padded")
            assert_same_bits(other[1], states, "their states")
        for n in everyone:
            out, state = decode([n], [order[n]])
            assert_same_bits(out[0], together[n], f"sequence {n} alone")
            assert_same_bits(state[0], states[n], "its state")


# NPU_OPS_CONSISTENT=1: training, prefill and decoding give the same bits


def layer(tokens, lengths, dtype):
    """Return the inputs of a Gated Delta Net layer's rule: raw gates, packed sequences.

    There are 32 value heads: with fewer, PyTorch's exp on CPUs rounds elements past the last two
    vectors differently.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    return {
        "q": normal(tokens, 8, 32).to(dtype), "k": normal(tokens, 8, 32).to(dtype),
        "v": normal(tokens, 32, 32).to(dtype), "a": normal(tokens, 32).to(dtype),
        "b": normal(tokens, 32).to(dtype), "A_log": normal(32), "dt_bias": normal(32).to(dtype),
        "starts": starts(lengths),
    }  # fmt: skip


def trained(x, gradient=None):
    """Return a trainer's outputs, with gates by PyTorch; with `gradient`, also v's gradient."""
    g = -x["A_log"].float().exp() * torch.nn.functional.softplus(x["a"].float() + x["dt_bias"])
    q, k, v = (x[n][None] for n in "qkv")
    v.requires_grad_(gradient is not None)
    o, _ = npu_ops.chunk_gated_delta_rule(
        q, k, v, g[None], x["b"].sigmoid()[None], cu_seqlens=x["starts"],
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    if gradient is None:
        return o[0]
    return o[0], torch.autograd.grad(o, v, gradient[None])[0]


def prompted(x, begin, end, state):
    """Run a server's prefill of tokens `begin` to `end`; return o and the state after them."""
    g, beta = npu_ops.gdn_gate(x["a"][begin:end], x["A_log"], x["dt_bias"], x["b"][begin:end])
    o, after = npu_ops.chunk_gated_delta_rule(
        *(x[n][None, begin:end] for n in "qkv"), g[None], beta[None], initial_state=state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
    )  # fmt: skip
    return o[0], after


def decoded(x, begin, end, pool, slot, **more):
    """Run a server's decoding step, with one token or several drafted ones."""
    qkv = tuple(x[n][begin:end] for n in "qkv")
    return npu_ops.gated_delta_rule_update(
        qkv, x["a"][begin:end], x["b"][begin:end], x["A_log"], x["dt_bias"], pool, slot,
        state_v_first=True, **more,
    )  # fmt: skip


STATES = torch.zeros(4, 32, 32, 32)
every_rule = pytest.mark.parametrize(
    "op, implementation, device",
    [
        chosen
        for chosen in by_implementation(["gated_delta_rule_update"], lambda name: name)
        if chosen.values[1] != "ascendc"  # AscendC has no kernel for training
    ],
)


def forced_in(implementation):
    return env.override(
        impl=dict.fromkeys(("chunk_gated_delta_rule", "gated_delta_rule_update"), implementation),
        consistent="tokens",
    )


@every_rule
@every_dtype
def test_training_prompts_and_decoding_are_consistent(op, implementation, device, dtype):
    """A packed sequence in training has the bits of a prompt that is cut and then decoded.

    Decoding runs token by token, or in drafts of which some are rejected.
    """
    lengths, n = (5, 90, 1, 44), 1
    x = on_device(layer(sum(lengths), lengths, dtype), device)
    begin, end = lengths[0], lengths[0] + lengths[n]
    slot = torch.tensor([2], dtype=torch.int32, device=device)
    with torch.no_grad(), forced_in(implementation):
        wanted = trained(x)[begin:end]
        for cut in (1, 40, 64):
            first, state = prompted(x, begin, begin + cut, None)
            middle, state = prompted(x, begin + cut, begin + 70, state)
            pool = torch.full((4, *state.shape[1:]), math.nan, device=device)
            pool[2] = state[0]
            parts = [first, middle]
            for token in range(begin + 70, begin + 80):
                parts.append(decoded(x, token, token + 1, pool, slot))
            kept, accepted = torch.zeros(1, 5, *pool.shape[1:], device=device), 0
            token = begin + 80
            while token < end:  # four drafted tokens, two of them accepted
                drafts = decoded(
                    x, token, min(token + 4, end), pool, slot, intermediate_states=kept,
                    num_accepted_tokens=torch.tensor([accepted], device=device),
                    disable_state_update=True,
                )  # fmt: skip
                parts.append(drafts[:2])
                accepted, token = 2, token + 2
            found = torch.cat(parts)
            assert_same_bits(found.cpu(), wanted.cpu(), f"cut at {cut}")


@every_rule
def test_gradients_of_the_consistent_mode(op, implementation, device):
    """Gradients equal the default mode's up to rounding: both modes run the chunked backward."""
    lengths = (5, 90, 1, 44)
    x = on_device(layer(sum(lengths), lengths, torch.float32), device)
    gradient = torch.ones_like(x["v"])
    found = []
    for consistent in ("", "tokens"):
        with env.override(consistent=consistent):
            found.append(trained(x, gradient))
    for default, consistent in zip(*found, strict=True):
        torch.testing.assert_close(default, consistent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"state": STATES.bfloat16()}, "state: got bfloat16 with NPU_OPS_CONSISTENT=1, needs"),
        ({"state_v_first": False}, "state_v_first: got False with NPU_OPS_CONSISTENT=1, needs"),
    ],
)
def test_states_that_training_does_not_have_are_refused(change, says):
    x = layer(1, (1,), torch.bfloat16)
    call = {"state": STATES.clone(), "state_v_first": True} | change
    before = call["state"].clone()
    refused = pytest.raises((TypeError, ValueError), match=f"^{says}")
    with env.override(consistent="tokens"), refused:
        npu_ops.gated_delta_rule_update(
            tuple(x[n] for n in "qkv"), x["a"], x["b"], x["A_log"], x["dt_bias"],
            state_indices=torch.tensor([1]), **call,
        )  # fmt: skip
    assert torch.equal(call["state"], before)


def test_what_only_chunks_can_do_is_refused():
    function, call, _, _ = delta_call(9, torch.float32, npu_ops.chunk_gated_delta_rule)
    says = "^return_intermediate_states: got True with NPU_OPS_CONSISTENT=1, needs False"
    with env.override(consistent="tokens"), pytest.raises(ValueError, match=says):
        function(**call, return_intermediate_states=True)
