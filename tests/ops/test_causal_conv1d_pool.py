"""causal_conv1d with a server's pool of states, as causal_conv1d_fn of vLLM and SGLang."""

import pytest
import torch
from support import devices, forced

import npu_ops
from npu_ops.core.compare import assert_close
from npu_ops.ops.causal_conv1d.cases import TOLERANCES

WIDTH, CHANNELS = 4, 40
STARTS = torch.tensor([0, 5, 5, 7, 16])
SLOTS = torch.tensor([3, -1, 0, 5])


def drawn(*shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(dtype)


def arguments(device="cpu", columns=WIDTH - 1, pool=torch.float32, **changes):
    given = {
        "x": drawn(1, 16, CHANNELS), "weight": drawn(CHANNELS, WIDTH), "bias": drawn(CHANNELS),
        "activation": "silu", "cu_seqlens": STARTS, "conv_state_indices": SLOTS,
        "conv_state": drawn(6, CHANNELS, columns, dtype=pool),
    } | changes  # fmt: skip
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def one_by_one(call):
    """Return y and the pool afterwards, computed one sequence at a time without a pool."""
    y, pool = torch.zeros_like(call["x"]), call["conv_state"].clone()
    has = call.get("has_initial_state")
    slots = call["conv_state_indices"].tolist()
    starts = call["cu_seqlens"].tolist()
    for n, (begin, end, slot) in enumerate(zip(starts, starts[1:], slots, strict=False)):
        before = torch.zeros(1, CHANNELS, WIDTH, device=y.device)
        if slot >= 0 and (has is None or has[n]):
            before[0, :, 1:] = call["conv_state"][slot, :, : WIDTH - 1]
        y[:, begin:end], after = npu_ops.causal_conv1d(
            call["x"][:, begin:end], call["weight"], call["bias"], activation="silu",
            initial_state=before, output_final_state=True,
        )  # fmt: skip
        if slot >= 0:
            pool[slot, :, : WIDTH - 1] = after[0, :, 1:].to(pool.dtype)
    return y, pool


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has", [None, [True, True, False, True], [False] * 4])
@pytest.mark.parametrize("columns", [3, 5])
def test_each_sequence_by_its_slot(columns, has, pool, device):
    given = None if has is None else torch.tensor(has)
    call = arguments(device, columns, pool, has_initial_state=given)
    right, after = one_by_one(call)
    y, none = npu_ops.causal_conv1d(**call)
    assert none is None
    assert_close("y", y, right, TOLERANCES[torch.float32])
    assert torch.equal(call["conv_state"], after)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("slots, pad", [([-1] * 4, -1), ([7, 7, 7, 7], 7)])
def test_nothing_but_padding_writes_nothing(slots, pad, device):
    call = arguments(device, conv_state_indices=torch.tensor(slots), pad_slot_id=pad)
    call["conv_state"][0] = float("nan")
    before = call["conv_state"].clone()
    y, _ = npu_ops.causal_conv1d(**call)
    assert y.isfinite().all()
    assert torch.equal(call["conv_state"].nan_to_num(9.0), before.nan_to_num(9.0))


def test_a_pool_without_slots_narrows_nothing():
    """If all sequences are padding, x is not rounded to the dtype of the pool."""
    call = arguments(conv_state_indices=torch.full((4,), -1))
    expected, _ = npu_ops.causal_conv1d(**call)
    call["conv_state"] = drawn(0, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    assert torch.equal(npu_ops.causal_conv1d(**call)[0], expected)


def test_a_final_state_has_the_dtype_of_the_initial_one():
    """On NPUs, a pool in a wider dtype than x gives the operator states in that dtype."""
    x, weight, state = drawn(1, 2, CHANNELS).bfloat16(), drawn(CHANNELS, 4), drawn(1, CHANNELS, 4)
    with forced("reference", "causal_conv1d"):
        _, final = torch.ops.npu_ops.causal_conv1d(x, weight, None, None, state, None, True, True)
    assert torch.equal(final[..., :2], state[..., 2:])


def test_slots_in_order_of_a_batch_in_any_memory():
    """Without indices, sequence n uses slot n. The pool's channels are contiguous in memory."""
    x, weight = drawn(3, 9, CHANNELS), drawn(CHANNELS, WIDTH)
    pool = drawn(4, 3, CHANNELS).transpose(1, 2)
    state = torch.nn.functional.pad(pool[:3], (1, 0))
    right, after = npu_ops.causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    left_alone = pool[3].clone()
    y, _ = npu_ops.causal_conv1d(x, weight, conv_state=pool)
    assert torch.equal(y, right)
    assert torch.equal(pool[:3], after[..., 1:]) and torch.equal(pool[3], left_alone)


def test_decoding_goes_on_where_a_prefill_ended():
    call = arguments()
    more = drawn(3, CHANNELS)
    whole = [torch.cat((call["x"][:, a:b], more[None, i : i + 1]), 1)
             for i, (a, b) in enumerate(((0, 5), (5, 7), (7, 16)))]  # fmt: skip
    slots = torch.tensor([3, 0, 5])
    states = torch.nn.functional.pad(call["conv_state"][slots], (1, 0))
    npu_ops.causal_conv1d(**call)
    y = npu_ops.causal_conv1d_update(
        more, call["conv_state"], call["weight"], call["bias"], "silu", slots
    )
    for i, x in enumerate(whole):
        right, _ = npu_ops.causal_conv1d(
            x, call["weight"], call["bias"], activation="silu", initial_state=states[i : i + 1]
        )
        assert_close("y", y[i], right[0, -1], TOLERANCES[torch.float32])


def test_slots_of_a_traced_call():
    """Slots are read when the graph runs, and slot 0 is an ordinary slot."""
    call, eager = arguments(), arguments()
    traced = torch.compile(npu_ops.causal_conv1d, fullgraph=True, backend="eager")
    y, _ = traced(**call)
    assert torch.equal(y, npu_ops.causal_conv1d(**eager)[0])
    for wrong in ([3, -1, 3, 5], [3, -1, -2, 5], [3, -1, 6, 5]):
        with pytest.raises(
            RuntimeError, match="got a slot twice or out of range, needs 0 to 5, all"
        ):
            traced(**call | {"conv_state_indices": torch.tensor(wrong)})
    torch._dynamo.reset()


def test_compiled():
    call, eager = arguments(), arguments()
    compiled = torch.compile(npu_ops.causal_conv1d, fullgraph=True, backend="aot_eager")
    y, _ = compiled(**call)
    assert torch.equal(y, npu_ops.causal_conv1d(**eager)[0])
    assert torch.equal(call["conv_state"], eager["conv_state"])
    torch._dynamo.reset()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pool", [torch.float32, torch.float16])
def test_what_is_in_a_pool_passes_no_narrower_dtype(pool, device):
    """With bf16 x and residual, pool rows that move or stay keep their bits.

    The filter reads them without rounding.
    """
    starts, slots = torch.tensor([0, 0, 1, 3, 12]), torch.tensor([4, 2, 5, 0])
    call = arguments(device, pool=pool, cu_seqlens=starts, conv_state_indices=slots)
    call["x"] = call["x"][:, :12].bfloat16()
    call["residual"] = 2 * call["x"]
    before = call["conv_state"].clone()
    y, _ = npu_ops.causal_conv1d(**call)
    after, x = call["conv_state"], call["x"][0].T.to(pool)
    # slots without a sequence, or with an empty one
    assert torch.equal(after[[1, 3, 4]], before[[1, 3, 4]])
    assert torch.equal(after[2], torch.cat([before[2, :, 1:], x[:, :1]], 1))
    assert torch.equal(after[5], torch.cat([before[5, :, 2:], x[:, 1:3]], 1))
    assert torch.equal(after[0], x[:, 9:])
    wide = {n: call[n].float() for n in ("x", "residual")}
    wide = call | wide | {"conv_state": before.float()}
    assert y.dtype == torch.bfloat16 and torch.equal(y, npu_ops.causal_conv1d(**wide)[0].bfloat16())
