"""rope in place, and under opcheck, gradcheck, torch.compile and autocast."""

import functools

import pytest
import support
import torch
from rope_calls import IMPLEMENTATIONS, LAYOUTS, PAIRS, qkv, rope, rope_freqs, table, to_layout
from torch.testing import assert_close

# In place


@IMPLEMENTATIONS
@support.parametrize_dtypes()
@PAIRS
def test_inplace_writes_q_and_k(dtype, pair_layout, implementation, device):
    q, k = (x.to(device) for x in qkv(dim=24, dtype=dtype))
    cos, sin = (t.to(device) for t in table(9, 16, pair_layout))
    keywords = {"layout": "BSND", "pair_layout": pair_layout}
    with support.forced(implementation, "rope"):
        expected = rope(q, k, cos, sin, **keywords)
        out = rope(q, k, cos, sin, inplace=True, **keywords)
    for x, o, e in zip((q, k), out, expected, strict=True):
        assert o is x and torch.equal(x, e)


@IMPLEMENTATIONS
def test_inplace_on_slices_leaves_the_rest(implementation, device):
    fused = torch.randn(9, 8, 16, device=device)
    before = fused.clone()
    q, k, v = fused.split((4, 2, 2), dim=1)
    cos, sin = (t.to(device) for t in table(9, 16))
    with support.forced(implementation, "rope"):
        expected = rope(q, k, cos, sin)
        assert rope(q, k, cos, sin, inplace=True)[1] is k
    assert torch.equal(fused, torch.cat((*expected, before[:, 6:]), dim=1))
    assert torch.equal(v, before[:, 6:])


def test_inplace_without_k():
    q = torch.randn(9, 4, 16)
    expected, _ = rope(q, None, *table(9, 16))
    out, none = rope(q, None, *table(9, 16), inplace=True)
    assert out is q and none is None and torch.equal(q, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inplace_is_allowed_where_nothing_is_recorded(context):
    q = torch.randn(9, 4, 16, requires_grad=True)
    expected = rope(q.detach(), None, *table(9, 16))[0]
    with context():
        rope(q, None, *table(9, 16), inplace=True)
    assert torch.equal(q.detach(), expected)


# Support for torch.compile, autograd and other features of torch


def test_the_operator_takes_two_dtypes():
    """The reference computes calls with two dtypes. Kernels and public functions take one."""
    q, k = torch.randn(2, 9, 4, 16)
    cos, sin = (t[None] for t in table(9, 16))

    def run(q, k, cos, sin):
        return torch.ops.npu_ops.rope(q, k, cos, sin, None, "TND", "half", False, 16)

    k, narrow = k.bfloat16(), sin.bfloat16()
    wide = narrow.float()
    expected = run(q, q, cos, wide)[0], run(k, k, cos, wide)[1]
    assert_close(run(q, k, cos, wide), expected)
    assert_close(run(q, q, cos, narrow)[0], expected[0])


def operator_inputs(dtype=torch.float32, requires_grad=True, gather=False):
    q, k = (x.to(dtype).requires_grad_(requires_grad) for x in qkv())
    cos, sin = (t[None] for t in table(20 if gather else 9, 8))
    positions = torch.randint(20, (2, 9)) if gather else None
    return q, k, cos, sin, positions, "BSND", "half", False, 8


@support.parametrize_dtypes(torch.float64)
@pytest.mark.parametrize("gather", [True, False])
def test_opcheck(dtype, gather):
    torch.library.opcheck(torch.ops.npu_ops.rope.default, operator_inputs(dtype, gather=gather))


@support.parametrize_dtypes(torch.float64)
def test_opcheck_in_place(dtype):
    inputs = operator_inputs(dtype, requires_grad=False)
    torch.library.opcheck(torch.ops.npu_ops.rope_.default, inputs)


@PAIRS
@pytest.mark.parametrize("layout", [*LAYOUTS, "TND"])
@pytest.mark.parametrize("inverse", [True, False])
def test_gradcheck(layout, pair_layout, inverse):
    q, k = qkv(2, 2, 1, 1, 8, torch.float64)
    q, k = (x[0] if layout == "TND" else to_layout(x, layout) for x in (q, k))
    cos, sin = torch.randn(2, 2, 6, dtype=torch.float64).unbind(0)

    def function(q, k):
        return rope(q, k, cos, sin, layout=layout, pair_layout=pair_layout, inverse=inverse)

    inputs = [x.detach().requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("mscale", [1.0, 1.5])
def test_gradcheck_freqs(mscale):
    q, k = (x.transpose(0, 1).detach().requires_grad_() for x in qkv(2, 3, 2, 1, 8, torch.float64))
    freqs = torch.randn(3, 2, 1, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rope_freqs(q, k, freqs, mscale=mscale), (q, k))


CALLS = {
    "tables": lambda q, k: rope(q, k, *table(9, 16), layout="BSND"),
    "position_ids": lambda q, k: rope(q, k, *table(30, 16), torch.arange(9)[None] * 3, 2),
    "k None": lambda q, k: (rope(q, None, *table(9, 16), layout="BSND")[0], k.sin()),
    "packed": lambda q, k: rope(
        q.flatten(0, 1), k.flatten(0, 1), *table(9, 16), cu_seqlens=torch.tensor([0, 9, 18])
    ),
    "freqs": lambda q, k: rope_freqs(
        q, k, torch.arange(9.0).view(9, 1, 1, 1).expand(9, 1, 1, 16), layout="BSND"
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(call, backend):
    """Compiled to one graph, forward and backward equal eager mode."""
    if backend == "inductor":
        call = {"tables": "tables"}.get(call, "freqs")
    support.assert_compiled_is_eager(lambda q, k: CALLS[call](q.sin(), k.sin()), qkv(), backend)


def test_compile_in_place():
    cos, sin = table(9, 16)
    call = functools.partial(rope, cos=cos, sin=sin, layout="BSND")
    support.assert_compiled_in_place_is_eager(call, *qkv())


@pytest.mark.parametrize("row", [-1, 5, 7])
def test_compiled_call_reads_no_row_outside_the_table(row):
    """A compiled call skips the public function's checks, so the operator checks again."""
    around = torch.full((12, 16), 7.0)
    inside = around[2:7]
    compiled = torch.compile(
        lambda q, positions: rope(q, None, inside, inside, positions)[0],
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(
        ValueError, match=f"positions: got {min(0, row)} to {max(0, row)}, needs 0 to 4"
    ):
        compiled(torch.ones(2, 1, 16), torch.tensor([0, row]))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=support.named)
def test_autocast(dtype):
    """q and k keep their dtype, fp32 or bf16 from a linear layer; the arithmetic stays fp32."""
    q, k = qkv(dtype=dtype)
    linear = torch.nn.Linear(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = rope(q, k, *table(9, 16), layout="BSND")
        through, _ = rope(linear(q), linear(k), *table(9, 16), layout="BSND")
    expected = rope(q, k, *table(9, 16), layout="BSND")
    for a, e in zip(outputs, expected, strict=True):
        assert a.dtype == dtype and torch.equal(a, e)
    assert through.dtype == torch.bfloat16
    through.float().square().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


FAKE_CALLS = {
    "tables": lambda q, k: rope(q, k, q.new_ones(9, 16), q.new_ones(9, 16), layout="BSND"),
    "position_ids": lambda q, k: rope(
        q, k, q.new_ones(30, 16), q.new_ones(30, 16), torch.arange(9)[None], layout="BSND"
    ),
    "packed": lambda q, k: rope(
        q.flatten(0, 1), k.flatten(0, 1), q.new_ones(30, 16), q.new_ones(30, 16),
        cu_seqlens=torch.tensor([0, 9, 18]),
    ),
    "freqs": lambda q, k: rope_freqs(q, k, q.new_ones(9, 1, 1, 16), layout="BSND"),
    "packed freqs": lambda q, k: rope_freqs(
        q.flatten(0, 1), k.flatten(0, 1), q.new_ones(9, 1, 1, 16), layout="TND",
        cu_seqlens=torch.tensor([0, 9, 18]),
    ),
}  # fmt: skip
STRIDED = {
    "dense": lambda heads: torch.randn(2, 9, heads, 16),
    "transposed": lambda heads: torch.randn(heads, 9, 2, 16).transpose(0, 2),
    "slice": lambda heads: torch.randn(2, 9, heads + 3, 16)[:, :, 1:-2],
    "last dimension not last": lambda heads: torch.randn(2, 9, 16, heads).transpose(2, 3),
}


@pytest.mark.parametrize("call", FAKE_CALLS)
@pytest.mark.parametrize("strides", STRIDED)
def test_fake_is_like_real(call, strides):
    """Results and gradients have the shape, strides and dtype of real ones."""
    real = [STRIDED[strides](heads) for heads in (4, 2)]
    for _ in range(2):  # twice, as no cache may carry a fake tensor from one mode to another
        support.assert_fake_is_like_real(support.with_gradients(FAKE_CALLS[call]), *real)
