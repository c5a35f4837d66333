"""mrope in place, and under opcheck, gradcheck, torch.compile and autocast."""

import functools
import itertools

import pytest
import support
import torch
from mrope_calls import (
    IMPLEMENTATIONS,
    LAYOUTS,
    PAIRS,
    SECTION_LAYOUTS,
    axes_table,
    cached,
    mrope,
    qkv,
)

from npu_ops.ops.rope.cases import tables

# In place


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@pytest.mark.parametrize("form", ["tables", "cached", "cached, heads flattened"])
def test_inplace_writes_q_and_k(section_layout, form, implementation, device):
    q, k = (x[0].to(device) for x in qkv(dim=16 if form == "tables" else 20))
    cos, sin = (t.to(device) for t in axes_table(9))
    cache = torch.cat(tables(torch.arange(50), 16, 1e4, "half", True), -1).to(device)
    positions = torch.randint(50, (3, 9), device=device)

    def function(q, k, inplace):
        if form == "tables":
            return mrope(q, k, cos, sin, [4, 2, 2], section_layout=section_layout, inplace=inplace)
        args = positions, q, k, cache, [4, 2, 2], section_layout
        return cached(*args, head_dim=20, inplace=inplace)

    if form.endswith("flattened"):
        q, k = q.flatten(1), k.flatten(1)
    with support.forced(implementation, "mrope"):
        expected = function(q, k, False)
        outputs = function(q, k, True)
    for x, out, e in zip((q, k), outputs, expected, strict=True):
        assert out.data_ptr() == x.data_ptr() and out.shape == x.shape
        assert torch.equal(x, e)


def test_inplace_returns_its_arguments():
    q, k = (x[0] for x in qkv())
    out = mrope(q, k, *axes_table(9), [4, 2, 2], section_layout="chunked", inplace=True)
    assert out[0] is q and out[1] is k


# Support for torch.compile, autograd and other features of torch


def operator_inputs(dtype=torch.float32, requires_grad=True, gather=False, sections="interleaved"):
    q, k = (x.to(dtype).requires_grad_(requires_grad) for x in qkv())
    if gather:
        cos, sin = (t[None, None] for t in tables(torch.arange(20), 8, 1e4, "half", True))
        positions = torch.randint(20, (3, 1, 9))
    else:
        (cos, sin), positions = axes_table(1, 9, width=8, half_table=True), None
    return q, k, cos, sin, positions, [2, 1, 1], sections, "BSND", "half", False, 8


@support.parametrize_dtypes(torch.float64)
@SECTION_LAYOUTS
@pytest.mark.parametrize("gather", [True, False])
def test_opcheck(dtype, section_layout, gather):
    inputs = operator_inputs(dtype, gather=gather, sections=section_layout)
    torch.library.opcheck(torch.ops.npu_ops.mrope.default, inputs)


@support.parametrize_dtypes(torch.float64)
def test_opcheck_in_place(dtype):
    inputs = operator_inputs(dtype, requires_grad=False)
    torch.library.opcheck(torch.ops.npu_ops.mrope_.default, inputs)


@SECTION_LAYOUTS
@PAIRS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inverse", [True, False])
def test_gradcheck(layout, section_layout, pair_layout, inverse):
    q, k = (x.permute(LAYOUTS[layout]) for x in qkv(2, 2, 1, 1, 10, torch.float64))
    cos, sin = torch.randn(2, 3, 2, 2, 8, dtype=torch.float64).unbind(0)
    settings = {"section_layout": section_layout, "pair_layout": pair_layout}

    def function(q, k):
        return mrope(q, k, cos, sin, [2, 1, 1], layout=layout, inverse=inverse, **settings)

    inputs = [x.detach().requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradcheck_cached():
    q, k = (x[0].detach().requires_grad_() for x in qkv(1, 3, 2, 1, 10, torch.float64))
    positions, cache = torch.randint(9, (3, 3)), torch.randn(9, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, k: cached(positions, q, k, cache, [2, 1, 1], "chunked"), (q, k)
    )


CALLS = {
    "tables": lambda q, k: mrope(
        q, k, torch.ones(3, 2, 9, 16), torch.ones(3, 2, 9, 16) / 2, [4, 2, 2],
        section_layout="interleaved", layout="BSND",
    ),
    "cached": lambda q, k: cached(
        torch.arange(54).view(3, 18), q.flatten(0, 1), k.flatten(0, 1),
        torch.arange(54.0 * 16).view(54, 16).cos(), [4, 2, 2], "chunked",
    ),
    "cached, text, heads flattened": lambda q, k: cached(
        torch.arange(18), q.flatten(0, 1).flatten(1), k.flatten(0, 1).flatten(1),
        torch.arange(54.0 * 16).view(54, 16).cos(), [4, 2, 2], "interleaved", head_dim=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "call, backend", [*itertools.product(CALLS, ["aot_eager"]), ("cached", "inductor")]
)
def test_compile(call, backend):
    """Compiled to one graph, forward and backward equal eager mode."""
    support.assert_compiled_is_eager(lambda q, k: CALLS[call](q.sin(), k.sin()), qkv(), backend)


def test_compile_in_place():
    cos, sin = axes_table(2, 9)
    settings = {"section_layout": "chunked", "layout": "BSND"}
    call = functools.partial(mrope, cos=cos, sin=sin, mrope_section=[4, 2, 2], **settings)
    support.assert_compiled_in_place_is_eager(call, *qkv())


@pytest.mark.parametrize("row", [-1, 5])
@pytest.mark.parametrize("axis", range(3))
def test_compiled_call_reads_no_row_outside_the_cache(axis, row):
    inside = torch.full((12, 16), 7.0)[2:7]
    compiled = torch.compile(
        lambda q, positions: cached(positions, q, None, inside, [4, 2, 2], "chunked")[0],
        fullgraph=True, backend="eager",
    )  # fmt: skip
    positions = torch.zeros(3, 2, dtype=torch.long)
    positions[axis, 1] = row
    with pytest.raises(
        ValueError, match=f"positions: got {min(0, row)} to {max(0, row)}, needs 0 to 4"
    ):
        compiled(torch.ones(2, 1, 16), positions)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=support.named)
def test_autocast(dtype):
    q, k = qkv(dtype=dtype)
    cos, sin = axes_table(2, 9)
    settings = {"section_layout": "chunked", "layout": "BSND"}
    with torch.autocast("cpu", torch.bfloat16):
        outputs = mrope(q, k, cos, sin, [4, 2, 2], **settings)
    expected = mrope(q, k, cos, sin, [4, 2, 2], **settings)
    for a, e in zip(outputs, expected, strict=True):
        assert a.dtype == dtype and torch.equal(a, e)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    cos, sin = axes_table(2, 9)

    def layer(x):
        return mrope(
            x.sin(), None, cos, sin, [4, 2, 2], section_layout="interleaved", layout="BSND"
        )[0]

    support.assert_checkpointing_changes_nothing(layer, qkv()[:1], use_reentrant)


FAKE_CALLS = {
    "tables": lambda q, k: mrope(
        q, k, q.new_ones(3, 2, 9, 16), q.new_ones(3, 2, 9, 16), [4, 2, 2], layout="BSND",
        section_layout="chunked",
    ),
    "cached": lambda q, k: cached(
        torch.zeros(3, 18, dtype=torch.long), q.flatten(0, 1), k.flatten(0, 1), q.new_ones(50, 16),
        [4, 2, 2], "chunked",
    ),
}  # fmt: skip
STRIDED = {
    "dense": lambda heads: torch.randn(2, 9, heads, 16),
    "transposed": lambda heads: torch.randn(heads, 9, 2, 16).transpose(0, 2),
    "slice": lambda heads: torch.randn(2, 9, heads + 3, 16)[:, :, 1:-2],
}


@pytest.mark.parametrize("call", FAKE_CALLS)
@pytest.mark.parametrize("strides", STRIDED)
def test_fake_is_like_real(call, strides):
    """Results and gradients have the shape, strides and dtype of real ones."""
    real = [STRIDED[strides](heads) for heads in (4, 2)]
    support.assert_fake_is_like_real(support.with_gradients(FAKE_CALLS[call]), *real)
