"""rope: every implementation against the reference, the reference against others' formulas."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    assert_all_close,
    assert_fake_is_like_real,
    assert_same_steps,
    copies,
    evaluate,
    floats,
    forced,
    implementations,
    named,
    parametrize_cases,
    parametrize_dtypes,
    threads,
    train_step,
    twice,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as qwen3_next
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import assert_close
from npu_ops.core.memo import ByContents
from npu_ops.ops.rope import freqs as freqs_form
from npu_ops.ops.rope import op
from npu_ops.ops.rope.cases import CASES, TOLERANCES, tables

BOTH_ROUND = twice(TOLERANCES)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation, device", implementations(op.table))
PAIRS = pytest.mark.parametrize("pair_layout", ["half", "interleaved"])
LAYOUTS = ("BSND", "SBND", "BNSD")
rope, rope_freqs = npu_ops.apply_rotary_pos_emb, npu_ops.apply_rotary_pos_emb_freqs


def run(implementation, inputs):
    with forced(implementation, "rope"):
        return evaluate(rope, inputs, ("q", "k"))


def compare(case, dtype, implementation, device, wide=torch.float64):
    expected = run("reference", floats(case.inputs(dtype), wide))
    actual = run(implementation, case.inputs(dtype, device))
    assert all(value.dtype == dtype for value in actual.values())
    assert_all_close(actual, expected, TOLERANCES)


def to_layout(x, layout):
    """[B, S, N, D] as a view in another layout."""
    return x.permute(*("BSND".index(axis) for axis in layout))


def from_layout(x, layout):
    return x.permute(*(layout.index(axis) for axis in "BSND"))


def qkv(batch=2, tokens=9, q_heads=4, k_heads=2, dim=16, dtype=torch.float32):
    return torch.randn(batch, tokens, q_heads, dim).to(dtype), torch.randn(
        batch, tokens, k_heads, dim
    ).to(dtype)


def table(rows, width, pair_layout="half", half_table=False):
    return tables(torch.arange(rows), width, 1e4, pair_layout, half_table)


# The values


@parametrize_cases(CASES, large=False)
@parametrize_dtypes()
@IMPLEMENTATIONS
def test_against_reference(case, dtype, implementation, device):
    compare(case, dtype, implementation, device)


@pytest.mark.slow
@parametrize_cases(CASES, large=True)
def test_large_against_reference(case):
    compare(case, torch.bfloat16, "cpu", "cpu", wide=torch.float32)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("per_batch", [True, False])
def test_hugging_face_call(unsqueeze_dim, per_batch):
    """Qwen3's own function: the same arguments, fp32 equal to rounding, gradients too."""
    q, k = (to_layout(x, "BNSD" if unsqueeze_dim == 1 else "BSND") for x in qkv())
    positions = torch.randint(100, (2 if per_batch else 1, 9))
    cos, sin = tables(positions, 16, 1e4, "half", False)
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin, "unsqueeze_dim": unsqueeze_dim}
    actual = evaluate(rope, inputs, ("q", "k"))
    assert_all_close(actual, evaluate(qwen3.apply_rotary_pos_emb, inputs, ("q", "k")), BOTH_ROUND)


def test_hugging_face_partial_rotary():
    """Qwen3-Next and Qwen3.5: the first 64 of 256 elements rotate."""
    q, k = (x.transpose(1, 2) for x in qkv(q_heads=4, k_heads=1, dim=256))
    cos, sin = (t[None] for t in table(9, 64))
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin}
    actual = evaluate(rope, inputs, ("q", "k"))
    assert_all_close(actual, evaluate(qwen3_next, inputs, ("q", "k")), BOTH_ROUND)
    assert torch.equal(actual["output 0"][..., 64:], q[..., 64:])


def test_hugging_face_vision():
    """Qwen3-VL's vision blocks: [S, N, 72] slices of a fused qkv, tables [S, 72]."""
    q, k, _ = torch.randn(31, 3, 4, 72).bfloat16().permute(1, 0, 2, 3).unbind(0)
    inputs = {"q": q, "k": k, "cos": table(31, 72)[0], "sin": table(31, 72)[1]}
    actual = evaluate(rope, inputs, ("q", "k"))
    expected = evaluate(qwen3_vl.apply_rotary_pos_emb_vision, inputs, ("q", "k"))
    assert_all_close(actual, expected, BOTH_ROUND)


def test_gptj_pairs_half_table():
    q, _ = qkv()
    cos, sin = table(9, 16, "interleaved", half_table=True)
    actual, none = rope(q, None, cos, sin, layout="BSND", pair_layout="interleaved", rotary_dim=16)
    assert none is None
    assert_close("q", actual, gptj(q, sin[None], cos[None]), BOTH_ROUND[torch.float32])


def test_cohere_pairs_full_table():
    q, k = qkv()
    cos, sin = table(9, 16, "interleaved")
    actual = rope(q, k, cos, sin, layout="BSND", pair_layout="interleaved")
    for x, out in zip((q, k), actual, strict=True):
        expected = x * cos[:, None] + rotate_pairs(x) * sin[:, None]
        assert_close("x", out, expected, BOTH_ROUND[torch.float32])


def complex_rotation(x, angles, pair_layout):
    """Each pair is a complex number, multiplied by exp(i * angle)."""
    x1, x2 = x.chunk(2, -1) if pair_layout == "half" else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(x1, x2) * torch.polar(torch.ones_like(angles), angles)
    if pair_layout == "half":
        return torch.cat((turned.real, turned.imag), -1)
    return torch.view_as_real(turned).flatten(-2)


@PAIRS
@pytest.mark.parametrize("half_table", [True, False])
def test_is_a_complex_multiplication(pair_layout, half_table):
    x = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    angles = torch.rand(9, 8, dtype=torch.float64) * 100
    wide = angles
    if not half_table:
        wide = (
            torch.cat((angles, angles), -1)
            if pair_layout == "half"
            else angles.repeat_interleave(2, -1)
        )
    out, _ = rope(
        x, None, wide.cos(), wide.sin(), layout="BSND", pair_layout=pair_layout, rotary_dim=16
    )
    torch.testing.assert_close(out, complex_rotation(x, angles[:, None], pair_layout))


@PAIRS
@IMPLEMENTATIONS
@pytest.mark.parametrize("inverse", [True, False])
def test_full_tables_may_differ_within_a_pair(pair_layout, implementation, device, inverse):
    """Each element is multiplied by its own entry; the inverse is the transposed matrix."""
    x, cos, sin = (torch.randn(n, dtype=torch.float64) for n in ((5, 1, 8), (5, 8), (5, 8)))
    partner = [(i + 4) % 8 if pair_layout == "half" else i ^ 1 for i in range(8)]
    sign = [-1.0 if i < partner[i] else 1.0 for i in range(8)]
    matrix = torch.diag_embed(cos)
    for i in range(8):
        matrix[:, i, partner[i]] += sign[i] * sin[:, i]
    expected = torch.einsum("tij,tnj->tni", matrix.mT if inverse else matrix, x)
    moved = (t.float().to(device) for t in (cos, sin))
    with forced(implementation, "rope"):
        out, _ = rope(x.float().to(device), None, *moved, pair_layout=pair_layout, inverse=inverse)
    assert_close("x", out.cpu(), expected, TOLERANCES[torch.float32])


# Layouts, heads and strides


@IMPLEMENTATIONS
@parametrize_dtypes()
@PAIRS
def test_layouts_are_equal_after_permutation(dtype, pair_layout, implementation, device):
    q, k = (x.to(device) for x in qkv(dtype=dtype))
    cos, sin = (torch.randn(2, 9, 16).to(device) for _ in range(2))
    settings = {"pair_layout": pair_layout}
    with forced(implementation, "rope"):
        expected = rope(q, k, cos, sin, layout="BSND", **settings)
        for layout in LAYOUTS:
            strided = [to_layout(x, layout) for x in (q, k)]
            for inputs in (strided, [x.contiguous() for x in strided]):
                outputs = rope(*inputs, cos, sin, layout=layout, **settings)
                for out, e in zip(outputs, expected, strict=True):
                    assert torch.equal(from_layout(out, layout), e)
        flat = rope(
            q.flatten(0, 1), k.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), **settings
        )
        for out, e in zip(flat, expected, strict=True):
            assert torch.equal(out, e.flatten(0, 1))


@IMPLEMENTATIONS
@pytest.mark.parametrize("k_heads", [0, 1, 2, 4, 7])
def test_k_may_have_any_number_of_heads(k_heads, implementation, device):
    q, k = (x.to(device) for x in qkv(k_heads=k_heads))
    cos, sin = (t.to(device) for t in table(9, 16))
    with forced(implementation, "rope"):
        both = rope(q, k, cos, sin, layout="BSND")
        alone = [rope(x, None, cos, sin, layout="BSND") for x in (q, k)]
    for out, (one, none) in zip(both, alone, strict=True):
        assert none is None and torch.equal(out, one)


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tail_is_copied(layout, pair_layout, implementation, device):
    q, k = (to_layout(x.to(device), layout) for x in qkv(dim=48))
    cos, sin = (t.to(device) for t in table(9, 32, pair_layout))
    with forced(implementation, "rope"):
        outputs = rope(q, k, cos, sin, layout=layout, pair_layout=pair_layout)
        heads = rope(q[..., :32], k[..., :32], cos, sin, layout=layout, pair_layout=pair_layout)
    for x, out, head in zip((q, k), outputs, heads, strict=True):
        assert torch.equal(out[..., 32:], x[..., 32:])
        assert torch.equal(out[..., :32], head)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=named)
@parametrize_dtypes()
@IMPLEMENTATIONS
def test_table_dtypes(dtype, table_dtype, implementation, device):
    """fp32 tables stay fp32 beside bf16 q and k, and the other way round."""
    inputs = dict(zip("qk", qkv(dtype=dtype), strict=True)) | {"layout": "BSND"}
    cos, sin = (t.to(table_dtype) for t in table(9, 16))
    expected = run("reference", floats(inputs | {"cos": cos, "sin": sin}, torch.float64))
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    actual = run(implementation, moved | {"cos": cos.to(device), "sin": sin.to(device)})
    assert_all_close(actual, expected, TOLERANCES)


def fused_qkv(layout):
    """q and k as slices of one projection, as each framework has them."""
    if layout == "TND":
        return torch.randn(64, 8 + 2 + 2, 16).split((8, 2, 2), dim=1)[:2]
    if layout == "SBND":  # Megatron: [s, b, groups, (q per group + 2) * d]
        mixed = torch.randn(64, 2, 2, (4 + 2) * 16)
        q, k, _ = mixed.split((64, 16, 16), dim=-1)
        return q.reshape(64, 2, 8, 16), k
    q, k, _ = torch.randn(2, 64, (8 + 2 + 2) * 16).split((128, 32, 32), dim=-1)
    q, k = q.unflatten(-1, (8, 16)), k.unflatten(-1, (2, 16))
    return (q, k) if layout == "BSND" else (q.transpose(1, 2), k.transpose(1, 2))


@pytest.mark.parametrize("layout", [*LAYOUTS, "TND"])
@pytest.mark.parametrize("call", ["rope", "freqs", "with k None"])
def test_slices_are_read_in_place(layout, call):
    """No operator copies, forward or backward, and only the outputs are allocated."""
    q, k = (x.detach().requires_grad_() for x in fused_qkv(layout))
    k = None if call == "with k None" else k
    assert not (q if k is None else k).is_contiguous() or layout == "SBND"
    cos, sin = table(64, 16)
    angles = torch.randn(64, 1, 1, 16)

    def function():
        if call == "freqs":
            return rope_freqs(q, k, angles, layout=layout)
        return rope(q, k, cos, sin, layout=layout)

    function()  # makes the tables of angles
    tensors = [x for x in (q, k) if x is not None]
    size = sum(x.numel() * 4 for x in tensors)
    with copies() as forward, env.override(strict=True):
        outputs = [out for out in function() if out is not None]
    grads = [torch.randn_like(out) for out in outputs]
    with copies() as backward, env.override(strict=True):
        torch.autograd.grad(outputs, tensors, grads)
    for seen in (forward, backward):
        assert seen.operators == []
        assert size <= seen.allocated <= size + 1000


@pytest.mark.parametrize(
    "gradient_of",
    [
        lambda out: torch.ones(()).expand(out.shape),
        lambda out: torch.randn(*out.shape[:2], out.shape[3], out.shape[2]).transpose(2, 3),
        lambda out: torch.randn(*out.shape[:3], 2 * out.shape[3])[..., ::2],
    ],
    ids=["expanded", "of k in q @ k.T", "every second"],
)
def test_gradients_of_any_strides_take_the_native_kernel(gradient_of):
    """Eager attention sends back a transposed gradient of k: no reason to be slow or to fail."""
    q, k = (x.requires_grad_() for x in qkv())
    outputs = rope(q, k, *table(9, 16), layout="BSND")
    grads = [gradient_of(out) for out in outputs]
    with env.override(strict=True):
        actual = torch.autograd.grad(outputs, (q, k), grads, retain_graph=True)
    expected = torch.autograd.grad(
        outputs, (q, k), [g.clone(memory_format=torch.contiguous_format) for g in grads]
    )
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_unused_output_needs_no_gradient():
    q, k = (x.requires_grad_() for x in qkv())
    q_out, _ = rope(q, k, *table(9, 16), layout="BSND")
    grads = torch.autograd.grad(q_out.square().sum(), (q, k))
    torch.testing.assert_close(grads[0], 2 * q)  # the rotation keeps the norm
    assert torch.equal(grads[1], torch.zeros_like(k))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_threads_change_nothing(number):
    inputs = CASES[2].inputs(torch.bfloat16)
    with threads(1):
        expected = run("cpu", inputs)
    with threads(number):
        actual = run("cpu", inputs)
    for name, value in actual.items():
        assert torch.equal(value, expected[name])


TABLE_STRIDES = {
    "columns of one tensor": lambda t: torch.cat((t, t), -1)[:, : t.shape[1]],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "one row for all": lambda t: t[3:4].expand_as(t),
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("strides", TABLE_STRIDES)
def test_tables_of_any_strides(strides):
    q, k = qkv()
    strided = [TABLE_STRIDES[strides](t) for t in table(9, 16)]
    dense = [t.clone(memory_format=torch.contiguous_format) for t in strided]
    outputs = (rope(q, k, *tables, layout="BSND") for tables in (strided, dense))
    for a, e in zip(*outputs, strict=True):
        assert_close("x", a, e, BOTH_ROUND[torch.float32])


def test_tables_that_want_a_gradient_serve_where_none_is_recorded():
    q, (cos, sin) = torch.randn(9, 2, 16), table(9, 16)
    expected = rope(q, None, cos, sin)[0]
    with torch.no_grad():
        assert torch.equal(rope(q, None, cos.requires_grad_(), sin.requires_grad_())[0], expected)


# Positions


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=named)
@pytest.mark.parametrize("layout", [*LAYOUTS, "TND"])
@pytest.mark.parametrize("shared", [True, False])
def test_position_ids_take_rows(layout, dtype, shared, implementation, device):
    batch = 1 if layout == "TND" else 2
    q, k = (x if layout == "TND" else to_layout(x, layout) for x in qkv(batch))
    q, k = ((x[0] if layout == "TND" else x).to(device) for x in (q, k))
    positions = torch.randint(50, (1 if shared else batch, 18), dtype=dtype)[:, ::2]
    cos, sin = table(50, 16)
    gathered = (t[positions.long()].to(device) for t in (cos, sin))
    if layout == "TND":
        gathered = (t[0] for t in gathered)
    with forced(implementation, "rope"):
        expected = rope(q, k, *gathered, layout=layout)
        actual = rope(q, k, cos.to(device), sin.to(device), positions.to(device), layout=layout)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_one_dimensional_position_ids_of_packed_tokens():
    q = torch.randn(9, 2, 16)
    cos, sin = table(50, 16)
    positions = torch.randint(50, (9,))
    actual, _ = rope(q, None, cos, sin, positions)
    assert torch.equal(actual, rope(q, None, cos[positions], sin[positions])[0])


@pytest.mark.parametrize("layout", [*LAYOUTS, "TND"])
def test_no_tokens_with_position_ids(layout):
    q = torch.randn(0, 2, 16) if layout == "TND" else to_layout(torch.randn(3, 0, 2, 16), layout)
    positions = torch.zeros(1 if layout == "TND" else 3, 0, dtype=torch.long)
    assert rope(q, None, *table(50, 16), positions, layout=layout)[0].shape == q.shape


def test_position_ids_beside_gathered_tables_are_not_read():
    """As in Hugging Face, whose deprecated position_ids argument this is."""
    q, k = qkv()
    cos, sin = (t.expand(2, 9, 16) for t in table(9, 16))
    ignored = torch.full((2, 9), 10**6)
    for a, e in zip(rope(q, k, cos, sin, ignored, 2), rope(q, k, cos, sin, None, 2), strict=True):
        assert torch.equal(a, e)


LENGTHS = [[0], [9], [4, 5], [1, 1, 1], [3, 0, 5, 1, 0], [0, 7], [63, 1, 65]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=named)
@PAIRS
def test_cu_seqlens_is_a_loop_over_sequences(lengths, dtype, pair_layout, implementation, device):
    cos, sin = (t.to(device) for t in table(70, 16, pair_layout))
    q, k = torch.randn(sum(lengths), 4, 16).to(device), torch.randn(sum(lengths), 2, 16).to(device)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)
    with forced(implementation, "rope"):
        packed = rope(q, k, cos, sin, pair_layout=pair_layout, cu_seqlens=cu_seqlens)
        pieces = [
            rope(*pair, cos[:n], sin[:n], pair_layout=pair_layout)
            for *pair, n in zip(q.split(lengths), k.split(lengths), lengths, strict=True)
        ]
    for a, e in zip(packed, zip(*pieces, strict=True), strict=True):
        assert torch.equal(a, torch.cat(e))


# The freqs form


def megatron_loop(x, freqs, pair_layout, mscale=1.0, inverse=False):
    """Megatron's `_apply_rotary_pos_emb_bshd` on one [S, B, N, D], in fp64, pair by pair."""
    out = x.double().clone()
    angles, rotary_dim = freqs.double(), freqs.shape[-1]
    cos, sin = angles.cos() * mscale, angles.sin() * (-mscale if inverse else mscale)
    for j in range(rotary_dim // 2):
        one, two = (j, j + rotary_dim // 2) if pair_layout == "half" else (2 * j, 2 * j + 1)
        x1, x2 = x[..., one].double(), x[..., two].double()
        out[..., one] = x1 * cos[..., one] - x2 * sin[..., one]
        out[..., two] = x2 * cos[..., two] + x1 * sin[..., two]
    return out


def angles(rows, width, pair_layout="half", batch=1):
    """Megatron's freqs: [rows, batch, 1, width] in fp32."""
    half = torch.randn(rows, batch, 1, width // 2)
    return torch.cat((half, half), -1) if pair_layout == "half" else half.repeat_interleave(2, -1)


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("batch", [1, 2], ids=["rope", "mrope"])
@pytest.mark.parametrize("mscale", [1.0, 1.3])
@pytest.mark.parametrize("inverse", [True, False])
def test_freqs(batch, mscale, inverse, pair_layout, implementation, device):
    q, k = (x.transpose(0, 1).to(device) for x in qkv(dim=24))
    freqs = angles(9, 16, pair_layout, batch).to(device)
    with forced(implementation, "rope"):
        outputs = rope_freqs(q, k, freqs, pair_layout=pair_layout, mscale=mscale, inverse=inverse)
    for x, out in zip((q, k), outputs, strict=True):
        expected = megatron_loop(x, freqs, pair_layout, mscale, inverse)
        assert_close("x", out, expected, BOTH_ROUND[torch.float32])


def zigzag(x, lengths, cp_size, cp_rank):
    """What a rank has of packed x: two of the 2 cp_size chunks of each sequence."""
    parts = []
    for sequence in x.split(lengths):
        chunks = sequence.chunk(2 * cp_size) if len(sequence) else [sequence] * 2 * cp_size
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else [sequence]
    return torch.cat(parts)


def megatron_packed(x, freqs, lengths, cp_size, cp_rank, per_token, pair_layout, mscale):
    """Megatron's `_apply_rotary_pos_emb_thd`: each sequence with its slices of freqs."""
    outputs, start = [], 0
    for n, sequence in zip(lengths, x.split([n // cp_size for n in lengths]), strict=True):
        offset = start if per_token else 0
        if cp_size > 1:
            piece = n // cp_size // 2
            first = freqs[offset + cp_rank * piece : offset + (cp_rank + 1) * piece]
            last = freqs[offset + n - (cp_rank + 1) * piece : offset + n - cp_rank * piece]
            mine = torch.cat((first, last))
        else:
            mine = freqs[offset : offset + n]
        outputs.append(megatron_loop(sequence[:, None], mine, pair_layout, mscale)[:, 0])
        start += n
    return torch.cat(outputs)


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[16, 8, 40], [8], [8, 0, 24]], ids=str)
def test_packed_freqs(lengths, cp_size, per_token, pair_layout, implementation, device):
    total = sum(lengths)
    rows = total if per_token else max(lengths) + 3
    freqs = angles(rows, 16, pair_layout)
    q, k = torch.randn(total, 3, 24), torch.randn(total, 1, 24)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    for cp_rank in range(cp_size):
        local = [zigzag(x, lengths, cp_size, cp_rank) for x in (q, k)]
        with forced(implementation, "rope"):
            outputs = rope_freqs(
                *(x.to(device) for x in local), freqs.to(device), layout="TND", mscale=1.1,
                pair_layout=pair_layout, cu_seqlens=cu_seqlens.to(device),
                cp_size=cp_size, cp_rank=cp_rank,
                max_seqlen=max(lengths) if per_token and len(lengths) > 1 else None,
            )  # fmt: skip
        for x, out in zip(local, outputs, strict=True):
            expected = megatron_packed(
                x, freqs, lengths, cp_size, cp_rank, per_token, pair_layout, 1.1
            )
            assert_close("x", out.cpu(), expected, BOTH_ROUND[torch.float32])


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_together_are_the_whole(cp_size):
    """Every rank's tokens, rotated there, are the ones rotated together."""
    lengths, freqs = [16, 48], angles(48, 16)
    q = torch.randn(64, 3, 16)
    packing = {"layout": "TND", "cu_seqlens": torch.tensor([0, 16, 64])}
    whole, _ = rope_freqs(q, None, freqs, **packing)
    for rank in range(cp_size):
        mine = zigzag(q, lengths, cp_size, rank)
        out, _ = rope_freqs(mine, None, freqs, cp_size=cp_size, cp_rank=rank, **packing)
        assert torch.equal(out, zigzag(whole, lengths, cp_size, rank))


def test_max_seqlen_says_which_freqs_are_per_token():
    """As many rows as tokens: without max_seqlen they are the tokens' own."""
    q, freqs, cu_seqlens = torch.randn(8, 1, 16), angles(8, 16), torch.tensor([0, 3, 8])
    packing = {"layout": "TND", "cu_seqlens": cu_seqlens}
    own = rope_freqs(q, None, freqs, layout="TND")[0]
    restarting = torch.cat(
        [rope_freqs(x, None, freqs[: len(x)], layout="TND")[0] for x in q.split((3, 5))]
    )
    assert torch.equal(rope_freqs(q, None, freqs, **packing)[0], own)
    assert torch.equal(rope_freqs(q, None, freqs, max_seqlen=5, **packing)[0], own)
    assert torch.equal(rope_freqs(q, None, freqs, max_seqlen=8, **packing)[0], restarting)


def test_padding_after_the_last_sequence_is_finite():
    q, freqs = torch.randn(12, 1, 16), angles(8, 16)
    out, _ = rope_freqs(
        q, None, freqs, layout="TND", cu_seqlens=torch.tensor([0, 3, 8]), max_seqlen=8
    )
    assert out.isfinite().all()
    expected = rope_freqs(
        q[:8], None, freqs, layout="TND", cu_seqlens=torch.tensor([0, 3, 8]), max_seqlen=8
    )
    assert torch.equal(out[:8], expected[0])


def test_bf16_freqs_are_not_rounded_again():
    """cos and sin of bf16 angles are fp32."""
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16).bfloat16()
    out, _ = rope_freqs(q, None, freqs)
    assert_close("q", out, megatron_loop(q, freqs, "half"), BOTH_ROUND[torch.float32])


def test_freqs_of_no_tokens():
    q, freqs = torch.randn(0, 2, 1, 16), angles(0, 16)
    assert rope_freqs(q, q, freqs)[1].shape == q.shape
    packed = {"layout": "TND", "cu_seqlens": torch.tensor([0, 0])}
    assert rope_freqs(q[:, 0], None, angles(9, 16), **packed)[0].shape == (0, 1, 16)


def test_an_update_of_cu_seqlens_is_seen():
    q, freqs, cu_seqlens = torch.randn(8, 1, 16), angles(9, 16), torch.tensor([0, 3, 8])
    packing = {"layout": "TND", "cu_seqlens": cu_seqlens}
    before, _ = rope_freqs(q, None, freqs, **packing)
    cu_seqlens[1] = 5
    after, _ = rope_freqs(q, None, freqs, **packing)
    assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3:5], after[3:5])
    restarting = [rope_freqs(x, None, freqs[: len(x)], layout="TND")[0] for x in q.split((5, 3))]
    assert torch.equal(after, torch.cat(restarting))


@pytest.fixture
def made(monkeypatch):
    """Counts how often cos and sin are made of freqs."""
    calls, make = [], freqs_form._cos_sin
    monkeypatch.setattr(freqs_form, "_cos_sin", lambda *args: calls.append(args) or make(*args))
    monkeypatch.setattr(freqs_form, "_tables", ByContents())
    return calls


def test_tables_are_made_once_for_all_layers(made):
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16)
    for _ in range(36):
        rope_freqs(q, None, freqs)
        rope_freqs(q, None, freqs.detach())  # activation checkpointing makes such aliases
    assert len(made) == 1
    rope_freqs(q, None, freqs, mscale=2.0)
    rope_freqs(q, None, freqs.clone())  # it has the same contents
    rope_freqs(q, None, freqs + 1)
    assert len(made) == 3


def test_an_update_of_freqs_is_seen(made):
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16)
    for update in (lambda: freqs.mul_(2), lambda: freqs[3].zero_(), lambda: freqs.detach().add_(1)):
        rope_freqs(q, None, freqs)
        update()
        out, _ = rope_freqs(q, None, freqs)
        assert_close("q", out, megatron_loop(q, freqs, "half"), BOTH_ROUND[torch.float32])
    assert len(made) == 4


def test_tables_of_an_inference_serve_training():
    """Megatron hands the same cached freqs to evaluation and to training."""
    q, freqs = torch.randn(9, 2, 1, 16, requires_grad=True), angles(9, 16)
    with torch.inference_mode():
        expected, _ = rope_freqs(q, None, freqs)
    out, _ = rope_freqs(q, None, freqs)
    out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant, made):
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16)
    grads = []
    for run_it in (
        lambda f, *args: f(*args),
        lambda f, *args: checkpoint(f, *args, use_reentrant=use_reentrant),
    ):
        leaf = q.clone().requires_grad_()
        hidden = leaf
        for _ in range(3):
            hidden = run_it(lambda x, f: rope_freqs(x.sin(), None, f)[0], hidden, freqs)
        hidden.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert len(made) == 1


# Properties


SHAPES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 20).map(lambda n: 2 * n),
)
MODES = {
    "pair_layout": st.sampled_from(["half", "interleaved"]),
    "half_table": st.booleans(),
    "tail": st.integers(0, 7),
    "layout": st.sampled_from(LAYOUTS),
    "seed": st.integers(0, 2**32),
}


def random_call(shape, layout, pair_layout, half_table, tail, seed, dtype=torch.float32):
    """Arguments of rope, with random positions."""
    batch, tokens, heads, rotary_dim = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, heads, rotary_dim + tail, generator=draw, dtype=dtype)
    positions = torch.randint(100_000, (batch, tokens), generator=draw)
    cos, sin = tables(positions, rotary_dim, 1e4, pair_layout, half_table)
    settings = {"layout": layout, "pair_layout": pair_layout, "rotary_dim": rotary_dim}
    return to_layout(x, layout), cos.to(dtype), sin.to(dtype), settings


@given(shape=SHAPES, **MODES)
@settings(max_examples=80, deadline=None)
def test_norms_are_kept(shape, **modes):
    q, cos, sin, keywords = random_call(shape, **modes)
    out, _ = rope(q, None, cos, sin, **keywords)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=1e-6)


@given(shape=SHAPES, **MODES)
@settings(max_examples=80, deadline=None)
def test_inverse_undoes(shape, **modes):
    q, cos, sin, keywords = random_call(shape, **modes)
    there = rope(q, q, cos, sin, **keywords)
    for back in rope(*there, cos, sin, inverse=True, **keywords):
        torch.testing.assert_close(back, q, rtol=1e-5, atol=2e-6)


@given(shape=SHAPES, **MODES)
@settings(max_examples=80, deadline=None)
def test_native_is_the_reference(shape, **modes):
    q, cos, sin, keywords = random_call(shape, **modes)
    with forced("cpu", "rope"):
        actual, _ = rope(q, None, cos, sin, **keywords)
    with forced("reference", "rope"):
        expected, _ = rope(q.double(), None, cos.double(), sin.double(), **keywords)
    assert_close("q", actual, expected, BOTH_ROUND[torch.float32])


@given(
    distance=st.integers(-500, 500), start=st.integers(1100, 5000), shift=st.integers(-500, 500),
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_scores_depend_on_distance_alone(distance, start, shift, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64, generator=draw).unbind(0)
    cos, sin = (t.double() for t in tables(torch.arange(7000), 32, 1e4, "half", False))

    def score(position):
        rotated = [
            rope(x, None, cos, sin, torch.tensor([[at]]))[0]
            for x, at in ((q, position), (k, position + distance))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(start), score(start + shift), rtol=0, atol=1e-5)  # fp32 tables


# In place


@IMPLEMENTATIONS
@parametrize_dtypes()
@PAIRS
def test_inplace_writes_q_and_k(dtype, pair_layout, implementation, device):
    q, k = (x.to(device) for x in qkv(dim=24, dtype=dtype))
    cos, sin = (t.to(device) for t in table(9, 16, pair_layout))
    keywords = {"layout": "BSND", "pair_layout": pair_layout}
    with forced(implementation, "rope"):
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
    with forced(implementation, "rope"):
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


# torch's machinery


def operator_inputs(dtype=torch.float32, requires_grad=True, gather=False):
    q, k = (x.to(dtype).requires_grad_(requires_grad) for x in qkv())
    cos, sin = (t[None] for t in table(20 if gather else 9, 8))
    positions = torch.randint(20, (2, 9)) if gather else None
    return q, k, cos, sin, positions, "BSND", "half", False, 8


@parametrize_dtypes(torch.float64)
@pytest.mark.parametrize("gather", [True, False])
def test_opcheck(dtype, gather):
    torch.library.opcheck(torch.ops.npu_ops.rope.default, operator_inputs(dtype, gather=gather))


@parametrize_dtypes(torch.float64)
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
    """One graph, forward and backward equal to eager."""
    if backend == "inductor":
        call = {"tables": "tables"}.get(call, "freqs")
    q, k = qkv()

    def function(q, k):
        outputs = CALLS[call](q.sin(), k.sin())
        return outputs[0].square().sum() + outputs[1].cos().sum()

    results = []
    for run_it in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        value = run_it(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    torch._dynamo.reset()
    for actual, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(actual, expected)


def test_compile_in_place():
    q, k = qkv()
    cos, sin = table(9, 16)
    expected = rope(q, k, cos, sin, layout="BSND")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k):
        rope(q, k, cos, sin, layout="BSND", inplace=True)
        return q + 1

    out = function(q, k)
    torch._dynamo.reset()
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(out, q + 1)


def test_one_compilation_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *args: rope(*args), fullgraph=True, dynamic=True, backend=counter
    )
    for tokens in (7, 64, 131):
        inputs = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), *table(tokens, 16)
        for a, e in zip(compiled(*inputs), rope(*inputs), strict=True):
            assert torch.equal(a, e)
    torch._dynamo.reset()
    assert counter.frame_count == 1


@pytest.mark.parametrize("row", [-1, 5, 7])
def test_compiled_call_reads_no_row_outside_the_table(row):
    """A compiled call has no check in Python: the native kernel's own must hold."""
    around = torch.full((12, 16), 7.0)
    inside = around[2:7]
    compiled = torch.compile(
        lambda q, positions: rope(q, None, inside, inside, positions)[0],
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(RuntimeError, match=f"positions: got row {row}, needs 0 to 4"):
        compiled(torch.ones(2, 1, 16), torch.tensor([0, row]))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_autocast(dtype):
    """q and k keep their dtype, bf16 from a linear layer or fp32; the arithmetic stays fp32."""
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
    """Under FakeTensorMode: shape, strides and dtype of the results and of the gradients."""

    def function(q, k):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        outputs = FAKE_CALLS[call](*leaves)
        return *outputs, *torch.autograd.grad(
            outputs, leaves, [torch.ones_like(o) for o in outputs]
        )

    real = [STRIDED[strides](heads) for heads in (4, 2)]
    for _ in range(2):  # a cache must not carry a fake tensor from one mode into another
        assert_fake_is_like_real(function, *real)


# Models


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("k_heads", [2, 4])
def test_qwen3_with_our_rope(attention, k_heads, monkeypatch):
    """A small Qwen3 whose apply_rotary_pos_emb is ours: the same logits and gradients."""
    torch.manual_seed(0)
    model = qwen3.Qwen3ForCausalLM(
        qwen3.Qwen3Config(
            vocab_size=61,
            hidden_size=48,
            intermediate_size=32,
            num_hidden_layers=2,
            head_dim=24,
            num_attention_heads=4,
            num_key_value_heads=k_heads,
            attn_implementation=attention,
        )  # fmt: skip
    )
    inputs = {"input_ids": torch.randint(61, (2, 13))}
    expected = train_step(model, **inputs)
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", rope)
    with env.override(strict=True):
        actual = train_step(model, **inputs)
    assert_same_steps(actual, expected)


def test_qwen3_vl_vision_with_our_rope(monkeypatch):
    torch.manual_seed(0)
    model = qwen3_vl.Qwen3VLVisionModel(
        qwen3_vl.Qwen3VLVisionConfig(
            hidden_size=144,
            num_heads=2,
            depth=2,
            intermediate_size=64,
            out_hidden_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        )  # fmt: skip
    )
    inputs = {
        "hidden_states": torch.randn(16 + 24, 3 * 2 * 16 * 16),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 6, 4]]),
    }
    expected = train_step(model, **inputs)
    monkeypatch.setattr(qwen3_vl, "apply_rotary_pos_emb_vision", rope)
    assert_same_steps(train_step(model, **inputs), expected)
