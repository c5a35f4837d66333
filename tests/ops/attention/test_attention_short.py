"""Attention of short sequences on the CPU: any shape and strides."""

import pytest
import torch
from attention_calls import run
from hypothesis import given, settings
from hypothesis import strategies as some
from support import DTYPES, assert_all_close, floats, threads

import npu_ops
from npu_ops.ops.attention import short
from npu_ops.ops.attention.cases import TOLERANCES

LENGTHS = some.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65])
DIMS = some.sampled_from([1, 7, 16, 24, 72, 80])


@pytest.fixture
def asked(monkeypatch):
    """Return a list that records each call of the native kernel: "forward" or "backward"."""
    calls = []
    for name in ("forward", "backward"):
        native = getattr(short, name)

        def watched(*args, name=name, native=native):
            calls.append(name)
            native(*args)

        monkeypatch.setattr(short, name, watched)
    return calls


def leaves(batch, queries, keys, heads, key_heads, dim, value_dim, dtype, apart):
    """Draw q, k and v; `apart` makes them slices with NaN between the rows."""
    draw = torch.Generator().manual_seed(queries * keys)
    shapes = (queries, heads, dim), (keys, key_heads, dim), (keys, key_heads, value_dim)
    made = [torch.randn(batch, *shape, generator=draw).to(dtype) for shape in shapes]
    if apart:
        made = [torch.cat([x, x + torch.nan], -1)[..., : x.shape[-1]] for x in made]
    return dict(zip("qkv", made, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    some.integers(1, 2), LENGTHS, LENGTHS, some.sampled_from([(1, 1), (4, 2), (6, 1)]), DIMS, DIMS,
    some.sampled_from(DTYPES), some.booleans(), some.booleans(),
    some.sampled_from(["bottom_right", "top_left"]), some.sampled_from([None, (-1, 3)]),
)  # fmt: skip
def test_any_shape(
    batch, queries, keys, heads, dim, value_dim, dtype, apart, causal, alignment, window
):
    inputs = leaves(batch, queries, keys, *heads, dim, value_dim, dtype, apart)
    inputs |= {"is_causal": causal, "causal_alignment": alignment, "window": window}
    with threads(2):
        actual = run(inputs, ("q", "k", "v"), "cpu")
    expected = run(floats(inputs, torch.float64), ("q", "k", "v"), "reference")
    for name, value in expected.items():  # a gradient may be 0, so no relative error alone
        most = 4 * TOLERANCES[dtype].max_abs
        # A gradient of k sums over queries and heads, and one of q over value_dim.
        sums = {"gradient of k": queries * heads[0], "gradient of q": max(1, value_dim / 16)}
        terms = sums.get(name, 1)
        torch.testing.assert_close(
            actual[name].double(), value.double(), atol=most * terms**0.5, rtol=most
        )


@settings(max_examples=100, deadline=None)
@given(
    LENGTHS, LENGTHS, DIMS, some.sampled_from(["bottom_right", "top_left"]),
    some.sampled_from(["q", "k", "v", "dout"]), some.integers(0, 64),
    some.sampled_from([float("nan"), float("inf")]),
)  # fmt: skip
def test_what_is_not_finite_reaches_what_it_takes_part_in_alone(
    queries, keys, dim, alignment, broken, place, value
):
    """A NaN or infinity in a row changes only the outputs and gradients that depend on the row."""
    inputs = leaves(1, queries, keys, 4, 2, dim, dim, torch.float32, False)
    inputs["dout"] = torch.ones_like(inputs["q"])
    of_keys = broken in "kv"
    place %= keys if of_keys else queries

    def gradients(given):
        mine = {name: given[name].clone().requires_grad_() for name in "qkv"}
        out = npu_ops.attention(**mine, is_causal=True, causal_alignment=alignment)
        return out, *torch.autograd.grad(out, list(mine.values()), given["dout"])

    expected = gradients(inputs)
    inputs[broken] = inputs[broken].index_fill(1, torch.tensor(place), value)
    actual = gradients(inputs)

    shift = keys - queries if alignment == "bottom_right" else 0
    sees = torch.ones(queries, keys).tril(shift).bool()
    asking = sees[:, place] if of_keys else torch.arange(queries) == place
    asked = sees[asking].any(0)
    out = torch.zeros_like(asking) if broken == "dout" else asking
    for touched, x, y in zip((out, asking, asked, asked), actual, expected, strict=True):
        torch.testing.assert_close(x[:, ~touched], y[:, ~touched])
    if broken == "v":
        assert not actual[0][:, asking].isfinite().any()


@pytest.mark.parametrize("length", [short.LONGEST, short.LONGEST + 1])
def test_as_long_as_it_is_made_for(length, asked):
    """Up to LONGEST tokens the kernel for short sequences runs, for one token more another one."""
    inputs = leaves(1, length, length, 2, 1, 16, 16, torch.float32, False) | {"is_causal": True}
    actual = run(inputs, ("q", "k", "v"), "cpu")
    assert asked == (["forward", "backward"] if length == short.LONGEST else [])
    expected = run(floats(inputs, torch.float64), ("q", "k", "v"), "reference")
    assert_all_close(actual, expected, TOLERANCES)


def test_each_packed_sequence_by_its_length(asked):
    """A long sequence in the batch does not keep short ones from the fast kernel."""
    starts = torch.tensor([0, 40, 40 + short.LONGEST + 8, 48 + short.LONGEST + 40])
    q, k, v = (
        x[0] for x in leaves(1, int(starts[-1]), 1, 2, 1, 16, 16, torch.float32, False).values()
    )
    k, v = (torch.randn(q.shape[0], 1, 16) for _ in range(2))
    call = {"layout": "TND", "is_causal": True}
    out = npu_ops.attention(q, k, v, cu_seqlens_q=starts, **call)
    assert asked == ["forward"] * 2
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        mine = slice(begin, end)
        alone = npu_ops.attention(
            q[mine], k[mine], v[mine], cu_seqlens_q=torch.tensor([0, end - begin]), **call
        )
        assert torch.equal(out[mine], alone)


def test_gradients_that_lie_otherwise(asked):
    """Gradients have the strides of their inputs.

    The native backward writes only dense rows, so another kernel runs here.
    """
    inputs = leaves(1, 9, 9, 2, 2, 16, 16, torch.float32, False)
    inputs = {name: x.transpose(1, 3).contiguous().transpose(1, 3) for name, x in inputs.items()}
    actual = run(inputs, ("q", "k", "v"), "cpu")
    assert asked == ["forward"]
    expected = run(floats(inputs, torch.float64), ("q", "k", "v"), "reference")
    assert_all_close(actual, expected, TOLERANCES)
