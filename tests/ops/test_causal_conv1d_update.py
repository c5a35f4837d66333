"""causal_conv1d_update: implementations against the reference, the reference against torch.cat."""

import pytest
import torch
import torch.nn.functional as F
from support import (
    assert_all_close,
    assert_fake_is_like_real,
    copies,
    every_implementation,
    floats,
    forced,
    named,
    on_device,
    parametrize_cases,
    parametrize_dtypes,
)
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core.compare import Tolerance
from npu_ops.ops.causal_conv1d_update import _prepare, op
from npu_ops.ops.causal_conv1d_update.cases import CASES

IMPLEMENTATIONS = every_implementation(op.forward)
FP64 = {torch.float64: Tolerance(ratio=1e-13, max_abs=1e-12)}


def run(implementation, inputs):
    """Return y and the tensors written in place, by name; `inputs` stay unchanged."""
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with forced(implementation, "causal_conv1d_update", "causal_conv1d"):
        written = {"y": npu_ops.causal_conv1d_update(**inputs)}
    for name in ("conv_state", "intermediate_conv_window"):
        if name in inputs:
            written[name] = inputs[name]
    return written


def one_pass(implementation, x, weight, activation=None):
    """Compute whole sequences at once; return y and the final states in the pool's shape."""
    if implementation == "ascendc":  # AscendC has no causal_conv1d kernel
        pool = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2]).transpose(1, 2)
        with forced(implementation, "causal_conv1d_update"):
            return npu_ops.causal_conv1d_update(x, pool, weight, None, activation), pool
    with forced(implementation, "causal_conv1d"):
        y, state = npu_ops.causal_conv1d(x, weight, activation=activation, output_final_state=True)
    return y, state[..., 1:]


def by_concatenation(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    num_accepted_tokens=None, query_start_loc=None, intermediate_conv_window=None,
    disable_state_update=False,
):  # fmt: skip
    """Compute the op with torch.cat, F.conv1d and slices, one sequence after another."""
    width, y, state = weight.shape[1], torch.zeros_like(x), conv_state.clone()
    window = None if intermediate_conv_window is None else intermediate_conv_window.clone()
    for n, slot in enumerate(conv_state_indices.tolist()):
        if slot == -1:
            continue
        where = n
        if query_start_loc is not None:
            where = slice(*query_start_loc[n : n + 2].tolist())
        tokens = x[where].t()
        count = tokens.shape[1]
        if not count:
            continue
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        rows = torch.cat([conv_state[slot, :, first : first + width - 1], tokens], dim=1)
        z = F.conv1d(rows[None], weight[:, None], bias, groups=len(rows))[0].t()
        y[where] = z if activation is None else F.silu(z)
        back = rows[:, -(width - 1) :] if num_accepted_tokens is None else rows[:, 1:]
        if not disable_state_update:
            state[slot, :, : back.shape[1]] = back
        for t in range(count if window is not None else 0):
            window[n, t] = rows[:, t + 1 : t + width]
    written = {"y": y, "conv_state": state}
    return written if window is None else written | {"intermediate_conv_window": window}


# Results, compared with the reference


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens and not c.large], ids=str)
def test_reference_is_a_concatenation(case):
    inputs = case.inputs(torch.float64)
    assert_all_close(run("reference", inputs), by_concatenation(**inputs), FP64)


@parametrize_cases(CASES, large=False)
@parametrize_dtypes()
@IMPLEMENTATIONS
def test_rows_go_back_bit_for_bit(case, dtype, implementation, device):
    """Written rows have the reference's bits, and elements that are not written keep theirs."""
    inputs = case.inputs(dtype)
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    for name in actual.keys() - {"y"}:
        assert torch.equal(actual[name].cpu().double(), expected[name])


@IMPLEMENTATIONS
def test_it_is_the_step_of_qwen3_next(implementation, device):
    x, weight, bias = torch.randn(3, 24), torch.randn(24, 4), torch.randn(24)
    cache = torch.randn(3, 24, 4)  # Hugging Face's cache has a column that is never read
    ours = cache[..., 1:].clone().to(device)
    with forced(implementation, "causal_conv1d_update"):
        y = npu_ops.causal_conv1d_update(
            x.to(device), ours, weight.to(device), bias.to(device), "silu"
        )
    expected = qwen3_next.causal_conv1d_update(x[..., None], cache, weight, bias, "silu")
    torch.testing.assert_close(y.cpu(), expected[..., 0])
    assert torch.equal(ours.cpu(), cache[..., 1:])


# Properties


@IMPLEMENTATIONS
@pytest.mark.parametrize("step", [1, 2, 7])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_step_by_step_is_one_pass(step, width, implementation, device):
    """Prefill, then decode `step` tokens at a time: the same bits as one pass."""
    x = torch.randn(2, 28, 20, device=device).bfloat16()
    weight = torch.randn(20, width, device=device).bfloat16()
    whole, last = one_pass(implementation, x, weight, "silu")
    start, pool = one_pass(implementation, x[:, :7], weight, "silu")
    parts = [start]
    with forced(implementation, "causal_conv1d_update"):
        for first in range(7, 28, step):
            new = x[:, first : first + step]
            parts.append(npu_ops.causal_conv1d_update(new, pool, weight, None, "silu"))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(pool, last)


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("drafts", [1, 3, 16])
def test_rejected_drafts_leave_no_trace(width, drafts, implementation, device):
    """After vLLM rejects some drafts, outputs equal those of one pass over the accepted tokens."""
    draw = torch.Generator().manual_seed(width)
    truth = torch.randn(1, 60, 12, generator=draw).to(device)
    weight = torch.randn(12, width, generator=draw).to(device)
    pool = torch.zeros(1, 12, width - 1 + drafts, device=device)
    expected, _ = one_pass(implementation, truth, weight)
    with forced(implementation, "causal_conv1d_update"):
        at, accepted = 0, 1
        while at + drafts <= 60:
            tokens = torch.randn(1, drafts, 12, generator=draw).to(device)
            number = int(torch.randint(1, drafts + 1, (), generator=draw))
            tokens[:, :number] = truth[:, at : at + number]
            y = npu_ops.causal_conv1d_update(
                tokens, pool, weight, num_accepted_tokens=torch.tensor([accepted], device=device)
            )
            torch.testing.assert_close(y[:, :number], expected[:, at : at + number])
            at, accepted = at + number, number


@IMPLEMENTATIONS
def test_a_window_is_the_state_to_go_on_from(implementation, device):
    """As in SGLang's verification of drafts, decoding continues from a token's saved window."""
    x, weight = torch.randn(2, 9, 12, device=device), torch.randn(12, 4, device=device)
    pool = torch.randn(2, 12, 3, device=device)
    before = pool.clone()
    window = torch.full((3, 5, 12, 3), 9.0, device=device)
    with forced(implementation, "causal_conv1d_update"):
        expected = npu_ops.causal_conv1d_update(x, pool.clone(), weight)
        npu_ops.causal_conv1d_update(
            x[:, :4], pool, weight, intermediate_conv_window=window,
            intermediate_state_indices=torch.tensor([2, -1], device=device),
            disable_state_update=True,
        )  # fmt: skip
        again = npu_ops.causal_conv1d_update(x[:1, 3:], window[2, 2][None], weight)
    assert torch.equal(pool, before)
    torch.testing.assert_close(again, expected[:1, 3:])
    assert (window[:2] == 9).all() and (window[2, 4] == 9).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("pad", [-1, 2, -7])
def test_skipped_sequences(pad, implementation, device):
    x, weight = torch.randn(3, 2, 8, device=device), torch.randn(8, 4, device=device)
    pool = torch.randn(5, 8, 3, device=device)
    before = pool.clone()
    indices = torch.tensor([4, pad, 0], device=device)
    with forced(implementation, "causal_conv1d_update"):
        y = npu_ops.causal_conv1d_update(
            x, pool, weight, conv_state_indices=indices, pad_slot_id=pad
        )
    assert not y[1].any() and y[0].any() and y[2].any()
    assert torch.equal(pool[1:4], before[1:4])
    assert not torch.equal(pool[0], before[0]) and not torch.equal(pool[4], before[4])


@IMPLEMENTATIONS
def test_sequences_may_read_one_slot_where_none_is_written(implementation, device):
    inputs = {
        "x": torch.randn(2, 16), "conv_state": torch.randn(3, 16, 3), "weight": torch.randn(16, 4),
        "conv_state_indices": torch.tensor([1, 1]), "disable_state_update": True,
    }  # fmt: skip
    inputs = on_device(inputs, device)
    both = run(implementation, inputs)
    for n in range(2):
        one = {"x": inputs["x"][n : n + 1], "conv_state_indices": torch.tensor([1], device=device)}
        assert torch.equal(both["y"][n], run(implementation, inputs | one)["y"][0])
    assert torch.equal(both["conv_state"], inputs["conv_state"])


@IMPLEMENTATIONS
def test_slots_in_order_are_none_of_them_padding(implementation, device):
    """Without indices no sequence is padding, as in upstream's kernels."""
    inputs = {"x": torch.randn(3, 16), "conv_state": torch.randn(3, 16, 3)}
    inputs |= {"weight": torch.randn(16, 4)}
    inputs = on_device(inputs, device)
    actual, expected = (run(implementation, inputs | {"pad_slot_id": n}) for n in (1, -1))
    for name, value in actual.items():
        assert torch.equal(value, expected[name])


@IMPLEMENTATIONS
def test_wrong_numbers_that_nobody_saw(implementation, device):
    """Wrong slots and counts are errors on the CPU.

    On a device only the y of their own sequence is NaN, and its state is unchanged.
    """
    x, weight = torch.randn(4, 2, 8, device=device), torch.randn(8, 4, device=device)
    pool = torch.randn(4, 8, 5, device=device)
    before = pool.clone()
    indices = torch.tensor([4, -2, 0, 1], device=device)
    accepted = torch.tensor([1, 1, 4, 2], device=device)
    args = (x, pool, weight, None, indices, accepted, None, None, None, -1, True, True)
    with forced(implementation, "causal_conv1d_update"):
        if device == "cpu":
            with pytest.raises(ValueError, match="^conv_state_indices: got -2 to 4, needs 0 to 3"):
                torch.ops.npu_ops.causal_conv1d_update(*args)
            assert torch.equal(pool, before)
            return
        y = torch.ops.npu_ops.causal_conv1d_update(*args)
    assert y[:3].isnan().all() and y[3].isfinite().all()
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(pool[1], before[1])


@IMPLEMENTATIONS
def test_starts_that_nobody_saw(implementation, device):
    """Wrong starts are an error on the CPU. On a device y is NaN, and the states are unchanged."""
    x, weight = torch.randn(1, 9, 8, device=device), torch.randn(8, 4, device=device)
    pool = torch.randn(2, 8, 3, device=device)
    before = pool.clone()
    starts = torch.tensor([0, 3, 12], device=device)
    args = (weight, None, None, None, starts, None, None, -1, False, True)
    with forced(implementation, "causal_conv1d_update"):
        if device == "cpu":
            with pytest.raises(ValueError, match="^query_start_loc: got"):
                torch.ops.npu_ops.causal_conv1d_update(x, pool, *args)
            return
        y = torch.ops.npu_ops.causal_conv1d_update(x, pool, *args)
    assert y.isnan().all() and torch.equal(pool, before)


@IMPLEMENTATIONS
def test_strided_x_is_read_in_place(implementation, device):
    fused, weight = torch.randn(3, 2, 24, device=device), torch.randn(4, 8, device=device).t()
    pool = torch.randn(3, 8, 3, device=device)
    with copies() as seen, forced(implementation, "causal_conv1d_update"):
        y = npu_ops.causal_conv1d_update(fused[..., 8:16], pool.clone(), weight)
    if implementation == "cpu":
        assert seen.operators == ["aten::clone", "aten::copy_"], "those of the test itself"
    with forced(implementation, "causal_conv1d_update"):
        dense = npu_ops.causal_conv1d_update(fused[..., 8:16].contiguous(), pool, weight)
    assert torch.equal(y, dense)


FORMS = {
    "taps in one piece": lambda weight: weight.t().contiguous().t(),
    "a slice of taps": lambda weight: torch.cat([weight, weight], 1)[:, :4],
    "a slice of many taps": lambda weight: weight.repeat(1, 5)[:, 12:16],
    "fp32": torch.Tensor.float,
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", FORMS)
def test_a_filter_may_lie_anywhere(form, implementation, device):
    draw = torch.Generator().manual_seed(1)
    x, pool = torch.randn(2, 3, 70, generator=draw), torch.randn(2, 70, 3, generator=draw)
    weight, bias = torch.randn(70, 4, generator=draw), torch.randn(70, generator=draw)
    x, pool, weight, bias = (t.to(device, torch.bfloat16) for t in (x, pool, weight, bias))
    apart = torch.stack([bias, weight[:, 0]], 1)[:, 0]
    with forced(implementation, "causal_conv1d_update"):
        expected = npu_ops.causal_conv1d_update(x, pool.clone(), weight, bias)
        y = npu_ops.causal_conv1d_update(x, pool, FORMS[form](weight), apart)
    assert torch.equal(y, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("channels_last", [True, False])
def test_windows_that_share_memory(channels_last, implementation, device):
    """Windows overlap in memory as in SGLang: each begins one token after the previous one."""
    draw = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 4, 20, generator=draw), torch.randn(20, 4, generator=draw)
    pool = torch.randn(2, 20, 3, generator=draw).to(device)
    rows = torch.zeros(2, 6, 20, device=device).mT
    rows = rows if channels_last else rows.contiguous()
    n, d, t = rows.stride()
    with forced(implementation, "causal_conv1d_update"):
        npu_ops.causal_conv1d_update(
            x.to(device), pool, weight.to(device), disable_state_update=True,
            intermediate_conv_window=rows.as_strided((2, 4, 20, 3), (n, t, d, t)),
        )  # fmt: skip
    expected = torch.cat([pool.cpu(), x.mT], dim=2)[..., 1:]
    assert torch.equal(rows.cpu(), expected)


def test_empty():
    pool = torch.randn(4, 8, 3)
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int32)
    y = npu_ops.causal_conv1d_update(
        torch.randn(0, 8), pool, torch.randn(8, 4), conv_state_indices=none
    )
    assert y.shape == (0, 8) and torch.equal(pool, before)


# Support for torch.compile, autograd and other features of torch


@pytest.mark.parametrize("case", [c for c in CASES if "-t3-" in c.name], ids=str)
def test_opcheck(case):
    args = _prepare(**case.inputs(torch.float32))
    torch.library.opcheck(torch.ops.npu_ops.causal_conv1d_update.default, args)


@pytest.mark.parametrize("case", [c for c in CASES if "-t3-" in c.name], ids=str)
def test_compile(case):
    inputs = case.inputs(torch.float32)
    expected = run("cpu", inputs)
    compiled = torch.compile(
        lambda **inputs: npu_ops.causal_conv1d_update(**inputs) * 2,
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    y = compiled(**inputs)
    torch._dynamo.reset()
    assert torch.equal(y, expected["y"] * 2)
    assert torch.equal(inputs["conv_state"], expected["conv_state"])


@pytest.mark.parametrize("make", [
    lambda: torch.randn(2, 3, 8), lambda: torch.randn(2, 8, 3).mT,
    lambda: torch.randn(2, 3, 24)[..., 8:16], lambda: torch.randn(2, 8),
], ids=["dense", "BDT", "slice", "one token"])  # fmt: skip
def test_fake_is_like_real(make):
    def function(x, state, weight):
        return (npu_ops.causal_conv1d_update(x, state, weight),)

    assert_fake_is_like_real(function, make(), torch.randn(2, 8, 3), torch.randn(8, 4))


def test_the_version_counts_the_write():
    state = torch.randn(2, 8, 3)
    version = state._version
    npu_ops.causal_conv1d_update(torch.randn(2, 8), state, torch.randn(8, 4))
    assert state._version > version


# Invalid calls


X, STATE, WEIGHT = torch.randn(2, 3, 8), torch.randn(4, 8, 5), torch.randn(8, 4)
INDICES = torch.tensor([2, 0])


def test_parameters_without_gradients_are_taken():
    with torch.no_grad():
        y = npu_ops.causal_conv1d_update(
            X, STATE.clone(), torch.nn.Parameter(WEIGHT), conv_state_indices=INDICES
        )
    assert named(y.dtype) == "float32"


def test_explain():
    verdicts = npu_ops.explain("causal_conv1d_update", X, STATE[:2], WEIGHT)
    assert [v.implementation for v in verdicts if v.why_not is None] == ["cpu"]


def test_windows_may_be_one_memory_a_token_apart():
    """SGLang's windows overlap: each begins one token later. Any other overlap is refused."""
    inputs = {"x": torch.randn(2, 3, 8), "weight": torch.randn(8, 4)}
    shared = torch.zeros(2, 8, 3 + 2)
    windows = shared.as_strided((2, 3, 8, 3), (shared.stride(0), 1, shared.stride(1), 1))
    apart, states = torch.zeros(2, 3, 8, 3), torch.randn(2, 8, 3)
    for window in (windows, apart):
        npu_ops.causal_conv1d_update(
            **inputs, conv_state=states.clone(), intermediate_conv_window=window
        )
    assert torch.equal(windows, apart)
    other = shared.as_strided((2, 3, 8, 3), (shared.stride(0), 2, 1, 1))
    with pytest.raises(ValueError, match="^intermediate_conv_window: got elements that overlap"):
        npu_ops.causal_conv1d_update(
            **inputs, conv_state=states.clone(), intermediate_conv_window=other
        )
