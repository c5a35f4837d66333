"""Decode attention on the CPU: one query per sequence, any cache layout and strides."""

import pytest
import torch
from attention_calls import run
from hypothesis import given, settings
from hypothesis import strategies as some
from support import DTYPES, floats, threads

import npu_ops
from npu_ops.core import library
from npu_ops.ops.attention import decode
from npu_ops.ops.attention.cases import TOLERANCES

DIMS = some.sampled_from([1, 7, 16, 24, 72, 128])
HEADS = some.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1), (16, 2)])


@pytest.fixture
def asked(monkeypatch):
    """Return a list that records the arguments of each call of the native decode kernel."""
    calls, native = [], decode.forward

    def watched(*args):
        calls.append(args)
        native(*args)

    monkeypatch.setattr(decode, "forward", watched)
    return calls


def step(lengths, heads, key_heads, dim, value_dim, block, dtype, heads_first=False):
    """Return arguments of a decoding step with a paged KV cache.

    Blocks are in random order and one is unused. Rows that belong to no sequence are NaN.
    """
    draw = torch.Generator().manual_seed(sum(lengths) + dim)
    table, seqlens = make_table(lengths, block, draw)
    blocks = int(table.max()) + 2
    q = torch.randn(len(lengths), 1, heads, dim, generator=draw)
    k = torch.randn(blocks, block, key_heads, dim, generator=draw)
    v = torch.randn(blocks, block, key_heads, value_dim, generator=draw)
    for cache in (k, v):
        hide_rest(cache, table, lengths)
    inputs = dict(zip("qkv", (x.to(dtype) for x in (q, k, v)), strict=True))
    if heads_first:
        inputs |= {x: inputs[x].transpose(1, 2).contiguous() for x in "qkv"} | {"layout": "BNSD"}
    return inputs | {"block_table": table, "seqlens_k": seqlens}


def make_table(lengths, block, draw):
    counts = [-(-length // block) for length in lengths]
    order = iter(torch.randperm(sum(counts), generator=draw).tolist())
    width = max(*counts, 1)
    rows = [[next(order) for _ in range(count)] + [-1] * (width - count) for count in counts]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths)


def hide_rest(cache, table, lengths):
    kept = cache.clone()
    cache.fill_(torch.nan)
    for row, length in zip(table.tolist(), lengths, strict=True):
        for j, block in enumerate(row):
            rows = slice(0, max(0, min(cache.shape[1], length - j * cache.shape[1])))
            cache[block, rows] = kept[block, rows]


def assert_right(inputs, dtype):
    with threads(2):
        actual = run(inputs, (), "cpu")
    expected = run(floats(inputs, torch.float64), (), "reference")
    for name, value in expected.items():
        most = 4 * TOLERANCES[dtype].max_abs
        torch.testing.assert_close(actual[name].double(), value.double(), atol=most, rtol=most)


@settings(max_examples=60, deadline=None)
@given(
    some.lists(some.integers(0, 70), min_size=1, max_size=4), HEADS, DIMS, DIMS,
    some.sampled_from([1, 16, 48]), some.sampled_from(DTYPES), some.booleans(), some.booleans(),
    some.booleans(),
)  # fmt: skip
def test_any_paged_cache(
    lengths, heads, dim, value_dim, block, dtype, causal, with_sinks, heads_first
):
    inputs = step(lengths, *heads, dim, value_dim, block, dtype, heads_first)
    sinks = torch.linspace(-1, 1, heads[0]) if with_sinks else None
    assert_right(inputs | {"is_causal": causal, "sinks": sinks}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_padded_cache(dtype, asked):
    """Without a block table each sequence has its own rows of k and v, here a strided slice."""
    q, long = torch.randn(3, 1, 8, 64).to(dtype), torch.randn(2, 3, 90, 2, 80).to(dtype)
    k, v = long[..., :64]
    assert_right({"q": q, "k": k, "v": v, "seqlens_k": torch.tensor([90, 0, 33])}, dtype)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"window": (3, -1)}, {"softcap": 5.0}, {"is_causal": True, "causal_alignment": "top_left"},
        {"dropout_p": 0.5},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_it_does_not_know_goes_elsewhere(other, asked):
    inputs = step([9, 20], 4, 2, 16, 16, 16, torch.float32)
    npu_ops.attention(**inputs | other)
    assert not asked
    npu_ops.attention(**inputs)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "name, value",
    [("seqlens_k", 33), ("seqlens_k", -1), ("block_table", 5), ("block_table", -1)],
)
def test_native_code_checks_what_it_follows(name, value):
    """Called directly with a bad index, the native operator raises before it writes."""
    inputs = step([20, 32], 4, 2, 16, 16, 16, torch.float32)
    q, k, v = (inputs[x].transpose(1, 2) for x in "qkv")
    table, seqlens = inputs["block_table"], inputs["seqlens_k"]
    {"seqlens_k": seqlens, "block_table": table}[name][1] = value
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    assert library.native_why_not() is None  # also loads the native library
    with pytest.raises(RuntimeError, match=rf"{name}: got {value}, needs 0 to"):
        torch.ops.npu_ops.attention_decode_cpu(q, k, v, table, seqlens, 1.0, out, lse)
    assert not out.any() and not lse.any()
