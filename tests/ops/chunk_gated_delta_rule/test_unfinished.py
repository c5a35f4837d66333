"""States that carry the tokens of an unfinished chunk, so that a sequence can be cut anywhere."""

import functools
import random

import pytest
import torch
from support import every_implementation, forced, named, on_device, on_npu

import npu_ops
from npu_ops.core import env
from npu_ops.ops.chunk_gated_delta_rule import op

CHUNK = 64
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)


def tokens(count, dtype=torch.float32, heads=2, value_heads=4, keys=32, values=48):
    draw = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=draw)
    return {
        "q": normal(1, count, heads, keys).to(dtype), "k": normal(1, count, heads, keys).to(dtype),
        "v": normal(1, count, value_heads, values).to(dtype),
        "g": -normal(1, count, value_heads).abs() / 4,
        "beta": normal(1, count, value_heads).sigmoid(),
    }  # fmt: skip


def starts(lengths, device):
    return torch.tensor((0, *lengths)).cumsum(0).to(device)


def rule(x, state=None, **more):
    return npu_ops.chunk_gated_delta_rule(
        **x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        state_v_first=True, **more,
    )  # fmt: skip


carried = functools.partial(rule, carry_unfinished=True)


def part(x, begin, end):
    return {name: t[:, begin:end] for name, t in x.items()}


def in_parts(x, cuts):
    """Return o and the carried state of a sequence that is computed in parts, cut at `cuts`."""
    state, found = None, []
    for begin, end in zip((0, *cuts), (*cuts, x["q"].shape[1]), strict=True):
        o, state = carried(part(x, begin, end), state)
        found.append(o)
    return torch.cat(found, 1), state


def same_bits(implementation):
    """Return the tolerances: bit-equality, except for the reference, which promises none."""
    exact = {"rtol": 0, "atol": 0}
    return exact if implementation != "reference" else {"rtol": 1e-2, "atol": 1e-3}


CUTS = [(1,), (64,), (65,), (3, 130), (10, 20, 63, 64, 65, 128), (0, 70, 70), (*range(120, 135),)]


@every_implementation(op.prefill)
@every_dtype
def test_a_prompt_that_is_cut_anywhere_is_as_uncut(implementation, device, dtype):
    """Results also equal those of training. Some cuts decode one token at a time."""
    x = on_device(tokens(150, dtype), device)
    close = functools.partial(torch.testing.assert_close, **same_bits(implementation))
    with (
        torch.no_grad(),
        forced(implementation, "chunk_gated_delta_rule"),
        env.override(consistent="chunks"),
    ):
        trained, _ = rule(x)
        uncut, state = carried(x)
        close(uncut, trained)
        for cuts in CUTS:
            o, after = in_parts(x, cuts)
            close(o, trained, msg=lambda said, cuts=cuts: f"cut at {cuts}: {said}")
            close(after, state)


@every_implementation(op.prefill)
def test_sequences_go_on_together(implementation, device):
    """Each step packs the next tokens of some sequences, in any order; some get none."""
    draw, lengths = random.Random(0), (5, 130, 64, 1)
    x = on_device(tokens(sum(lengths)), device)
    close = functools.partial(torch.testing.assert_close, **same_bits(implementation))
    with (
        torch.no_grad(),
        forced(implementation, "chunk_gated_delta_rule"),
        env.override(consistent="chunks"),
    ):
        wanted, _ = rule(x, cu_seqlens=starts(lengths, device))
        pool = torch.zeros(4, 4, 48 + npu_ops.unfinished_rows(32, 48), 32, device=device)
        done, found = [0] * 4, torch.zeros_like(wanted)
        while done != list(lengths):
            order = draw.sample(range(4), 4)
            steps = [min(draw.choice((0, 1, 1, 40, 90)), lengths[n] - done[n]) for n in order]
            rows = [
                sum(lengths[:n]) + done[n] + i
                for n, step in zip(order, steps, strict=True)
                for i in range(step)
            ]
            taken = {name: t[:, rows] for name, t in x.items()}
            o, pool[order] = carried(taken, pool[order], cu_seqlens=starts(steps, device))
            found[:, rows] = o
            for n, step in zip(order, steps, strict=True):
                done[n] += step
        close(found, wanted)


@every_implementation(op.prefill)
def test_tokens_of_nobody_get_0_and_wrong_states_and_lengths_nan(implementation, device):
    """On the CPU a wrong state and wrong lengths raise errors.

    On a device a wrong state gives NaN in its own sequence only, wrong lengths in all.
    """
    x, lengths = on_device(tokens(20), device), (7, 9)
    with torch.no_grad(), forced(implementation, "chunk_gated_delta_rule"):
        packed = {"cu_seqlens": starts(lengths, device)}
        wanted, state = carried(x, **packed)
        assert not wanted[:, 16:].any() and wanted[:, :16].abs().amax((2, 3)).all()
        wrong = state.clone()
        wrong[0, :, 48 + CHUNK :] = 1.5
        beyond = {"cu_seqlens": starts((7, 14), device)}
        if device == "cpu":
            with pytest.raises(ValueError, match="^initial_state: got an unfinished chunk of 1.5"):
                carried(x, wrong, **packed)
            with pytest.raises(ValueError, match="^cu_seqlens: got 0 first and 21 last, needs"):
                carried(x, state, **beyond)
            return
        right, of_right = carried(x, state, **packed)
        o, after = carried(x, wrong, **packed)
        assert o[:, :7].isnan().all() and after[0, :, :48].isnan().all()
        torch.testing.assert_close(o[:, 7:], right[:, 7:], rtol=0, atol=0)
        torch.testing.assert_close(after[1], of_right[1], rtol=0, atol=0)
        o, after = carried(x, state, **beyond)
        assert o.isnan().all() and after[:, :, :48].isnan().all()


@on_npu
def test_a_long_prompt_of_few_heads_is_as_alone(device):
    """Without NPU_OPS_CONSISTENT, idle cores compute segments in parallel, which changes bits.

    How many cores are idle depends on the other sequences of the batch.
    """
    count = 65 * CHUNK
    x = tokens(count + 11, torch.bfloat16, heads=1, value_heads=1, keys=16, values=16)
    x["g"] /= 1000  # so a state outlasts a segment
    x = on_device(x, device)
    packed = starts((count, *[1] * 11), device)
    with torch.no_grad(), forced("triton_ascend", "chunk_gated_delta_rule"):
        apart = rule(part(x, 0, count))[0], rule(x, cu_seqlens=packed)[0][:, :count]
        assert not torch.equal(*apart)
        with env.override(consistent="chunks"):
            apart = rule(part(x, 0, count))[0], rule(x, cu_seqlens=packed)[0][:, :count]
        assert torch.equal(*apart)


def test_a_required_gradient_is_refused():
    x = tokens(9)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="^v: got a tensor that req.* with carry_unfinished$"):
        carried(x)


def test_a_state_has_the_tokens_of_its_unfinished_chunk():
    """Tokens follow the state: one row per key, then values, g and beta, then the token count."""
    x = tokens(70)
    with torch.no_grad():
        _, state = npu_ops.chunk_gated_delta_rule(
            **x, output_final_state=True, state_v_first=True, carry_unfinished=True
        )
        _, before = npu_ops.chunk_gated_delta_rule(
            **part(x, 0, 64), output_final_state=True, state_v_first=True
        )
    (state,) = state
    torch.testing.assert_close(state[:, :48], before[0])
    assert torch.equal(state[2, 48:54], x["k"][0, 64:, 1])  # value head 2 uses key head 1
    run = state[2, 48 + CHUNK :].flatten()
    assert torch.equal(run[: 6 * 48], x["v"][0, 64:, 2].flatten())
    g, beta, (count,) = run[CHUNK * 48 :][: 2 * CHUNK + 1].split((CHUNK, CHUNK, 1))
    assert torch.equal(g[:6], x["g"][0, 64:, 2]) and torch.equal(beta[:6], x["beta"][0, 64:, 2])
    assert count == 6 and not g[6:].any() and not state[2, 54 : 48 + CHUNK].any()
