"""rope against other implementations: layouts, heads, strides, positions, models."""

import itertools

import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_calls import (
    BOTH_ROUND,
    IMPLEMENTATIONS,
    LAYOUTS,
    PAIRS,
    qkv,
    rope,
    rope_freqs,
    table,
    to_layout,
)
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as qwen3_next
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from npu_ops.core import env
from npu_ops.core.compare import assert_close
from npu_ops.ops.rope.cases import CASES, TOLERANCES, tables


def run(implementation, inputs):
    with support.forced(implementation, "rope"):
        return support.evaluate(rope, inputs, ("q", "k"))


def from_layout(x, layout):
    return x.permute(*(layout.index(axis) for axis in "BSND"))


# Results, compared with the reference


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("per_batch", [True, False])
def test_hugging_face_call(unsqueeze_dim, per_batch):
    """Takes the arguments of Qwen3's own function; results and gradients agree up to rounding."""
    q, k = (to_layout(x, "BNSD" if unsqueeze_dim == 1 else "BSND") for x in qkv())
    positions = torch.randint(100, (2 if per_batch else 1, 9))
    cos, sin = tables(positions, 16, 1e4, "half", False)
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin, "unsqueeze_dim": unsqueeze_dim}
    actual = support.evaluate(rope, inputs, ("q", "k"))
    support.assert_all_close(
        actual, support.evaluate(qwen3.apply_rotary_pos_emb, inputs, ("q", "k")), BOTH_ROUND
    )


def test_hugging_face_partial_rotary():
    """As in Qwen3-Next and Qwen3.5, the first 64 of 256 elements rotate."""
    q, k = (x.transpose(1, 2) for x in qkv(q_heads=4, k_heads=1, dim=256))
    cos, sin = (t[None] for t in table(9, 64))
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin}
    actual = support.evaluate(rope, inputs, ("q", "k"))
    support.assert_all_close(actual, support.evaluate(qwen3_next, inputs, ("q", "k")), BOTH_ROUND)
    assert torch.equal(actual["output 0"][..., 64:], q[..., 64:])


def test_hugging_face_vision():
    """q and k are [S, N, 72] slices of a fused qkv, as in Qwen3-VL's vision; tables are [S, 72]."""
    q, k, _ = torch.randn(31, 3, 4, 72).bfloat16().permute(1, 0, 2, 3).unbind(0)
    inputs = {"q": q, "k": k, "cos": table(31, 72)[0], "sin": table(31, 72)[1]}
    actual = support.evaluate(rope, inputs, ("q", "k"))
    expected = support.evaluate(qwen3_vl.apply_rotary_pos_emb_vision, inputs, ("q", "k"))
    support.assert_all_close(actual, expected, BOTH_ROUND)


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
    """Rotate each pair as a complex number: multiply by exp(i * angle)."""
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
    """Each element has its own table entry; the inverse multiplies by the transposed matrix."""
    x, cos, sin = (torch.randn(n, dtype=torch.float64) for n in ((5, 1, 8), (5, 8), (5, 8)))
    partner = [(i + 4) % 8 if pair_layout == "half" else i ^ 1 for i in range(8)]
    sign = [-1.0 if i < partner[i] else 1.0 for i in range(8)]
    matrix = torch.diag_embed(cos)
    for i in range(8):
        matrix[:, i, partner[i]] += sign[i] * sin[:, i]
    expected = torch.einsum("tij,tnj->tni", matrix.mT if inverse else matrix, x)
    moved = (t.float().to(device) for t in (cos, sin))
    with support.forced(implementation, "rope"):
        out, _ = rope(x.float().to(device), None, *moved, pair_layout=pair_layout, inverse=inverse)
    assert_close("x", out.cpu(), expected, TOLERANCES[torch.float32])


# Layouts, heads and strides


@IMPLEMENTATIONS
@support.parametrize_dtypes()
@PAIRS
def test_layouts_are_equal_after_permutation(dtype, pair_layout, implementation, device):
    q, k = (x.to(device) for x in qkv(dtype=dtype))
    cos, sin = (torch.randn(2, 9, 16).to(device) for _ in range(2))
    settings = {"pair_layout": pair_layout}
    with support.forced(implementation, "rope"):
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
    with support.forced(implementation, "rope"):
        both = rope(q, k, cos, sin, layout="BSND")
        alone = [rope(x, None, cos, sin, layout="BSND") for x in (q, k)]
    for out, (one, none) in zip(both, alone, strict=True):
        assert none is None and torch.equal(out, one)


@IMPLEMENTATIONS
def test_heads_expanded_from_one(implementation, device):
    """Keys shared by a group of queries have stride 0 between heads."""
    q, one = (torch.randn(1, 64, heads, 16).to(device) for heads in (4, 1))
    cos, sin = (t.to(device) for t in table(64, 16))
    with support.forced(implementation, "rope"):
        _, expected = rope(q, one.expand(q.shape).contiguous(), cos, sin, layout="BSND")
        _, actual = rope(q, one.expand(q.shape), cos, sin, layout="BSND")
    assert torch.equal(actual, expected)


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tail_is_copied(layout, pair_layout, implementation, device):
    q, k = (to_layout(x.to(device), layout) for x in qkv(dim=48))
    cos, sin = (t.to(device) for t in table(9, 32, pair_layout))
    with support.forced(implementation, "rope"):
        outputs = rope(q, k, cos, sin, layout=layout, pair_layout=pair_layout)
        heads = rope(q[..., :32], k[..., :32], cos, sin, layout=layout, pair_layout=pair_layout)
    for x, out, head in zip((q, k), outputs, heads, strict=True):
        assert torch.equal(out[..., 32:], x[..., 32:])
        assert torch.equal(out[..., :32], head)


@pytest.mark.parametrize(
    "table_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=support.named
)
@support.parametrize_dtypes()
@IMPLEMENTATIONS
def test_table_dtypes(dtype, table_dtype, implementation, device):
    """Tables keep their dtype: fp32 beside bf16 q and k, and the other way round."""
    inputs = dict(zip("qk", qkv(dtype=dtype), strict=True)) | {"layout": "BSND"}
    cos, sin = (t.to(table_dtype) for t in table(9, 16))
    expected = run("reference", support.floats(inputs | {"cos": cos, "sin": sin}, torch.float64))
    moved = support.on_device(inputs, device)
    actual = run(implementation, moved | {"cos": cos.to(device), "sin": sin.to(device)})
    support.assert_all_close(actual, expected, TOLERANCES)


def fused_qkv(layout):
    """Return q and k as slices of one fused projection, as a framework with this
    layout has them."""
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

    tensors = [x for x in (q, k) if x is not None]
    size = sum(x.numel() * 4 for x in tensors)
    with support.copies() as forward, env.override(strict=True):
        outputs = [out for out in function() if out is not None]
    grads = [torch.randn_like(out) for out in outputs]
    with support.copies() as backward, env.override(strict=True):
        torch.autograd.grad(outputs, tensors, grads)
    tables = 2 * angles.nbytes if call == "freqs" else 0
    for seen, needed in ((forward, size + tables), (backward, size)):
        assert seen.operators == []
        assert needed <= seen.allocated <= needed + 1000


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
    """Eager attention returns a transposed gradient of k, which must not cause a fallback."""
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
    torch.testing.assert_close(grads[0], 2 * q)  # a rotation keeps |q|
    assert torch.equal(grads[1], torch.zeros_like(k))


def test_threads_change_nothing():
    inputs = CASES[2].inputs(torch.bfloat16)
    support.assert_threads_change_nothing(lambda: run("cpu", inputs))


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
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=support.named)
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
    with support.forced(implementation, "rope"):
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
    """As in Hugging Face, the deprecated position_ids are ignored beside gathered tables."""
    q, k = qkv()
    cos, sin = (t.expand(2, 9, 16) for t in table(9, 16))
    ignored = torch.full((2, 9), 10**6)
    for a, e in zip(rope(q, k, cos, sin, ignored, 2), rope(q, k, cos, sin, None, 2), strict=True):
        assert torch.equal(a, e)


LENGTHS = [[0], [9], [4, 5], [1, 1, 1], [3, 0, 5, 1, 0], [0, 7], [63, 1, 65]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=support.named)
@PAIRS
def test_cu_seqlens_is_a_loop_over_sequences(lengths, dtype, pair_layout, implementation, device):
    cos, sin = (t.to(device) for t in table(70, 16, pair_layout))
    q, k = torch.randn(sum(lengths), 4, 16).to(device), torch.randn(sum(lengths), 2, 16).to(device)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)
    with support.forced(implementation, "rope"):
        packed = rope(q, k, cos, sin, pair_layout=pair_layout, cu_seqlens=cu_seqlens)
        pieces = [
            rope(*pair, cos[:n], sin[:n], pair_layout=pair_layout)
            for *pair, n in zip(q.split(lengths), k.split(lengths), lengths, strict=True)
        ]
    for a, e in zip(packed, zip(*pieces, strict=True), strict=True):
        assert torch.equal(a, torch.cat(e))


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
    """Draw arguments of rope with random positions."""
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
    with support.forced("cpu", "rope"):
        actual, _ = rope(q, None, cos, sin, **keywords)
    with support.forced("reference", "rope"):
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


# Models


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("k_heads", [2, 4])
def test_qwen3_with_our_rope(attention, k_heads, monkeypatch):
    """A small Qwen3 with our apply_rotary_pos_emb has the same logits and gradients."""
    torch.manual_seed(0)
    config = qwen3.Qwen3Config(
        vocab_size=61, hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=24,
        num_attention_heads=4, num_key_value_heads=k_heads, attn_implementation=attention,
    )  # fmt: skip
    model = qwen3.Qwen3ForCausalLM(config)
    inputs = {"input_ids": torch.randint(61, (2, 13))}
    expected = support.train_step(model, **inputs)
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", rope)
    with env.override(strict=True):
        actual = support.train_step(model, **inputs)
    support.assert_same_steps(actual, expected)


def test_qwen3_vl_vision_with_our_rope(monkeypatch):
    torch.manual_seed(0)
    config = qwen3_vl.Qwen3VLVisionConfig(
        hidden_size=144, num_heads=2, depth=2, intermediate_size=64, out_hidden_size=32,
        num_position_embeddings=16, deepstack_visual_indexes=[0],
    )  # fmt: skip
    model = qwen3_vl.Qwen3VLVisionModel(config)
    inputs = {
        "hidden_states": torch.randn(16 + 24, 3 * 2 * 16 * 16),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 6, 4]]),
    }
    expected = support.train_step(model, **inputs)
    monkeypatch.setattr(qwen3_vl, "apply_rotary_pos_emb_vision", rope)
    support.assert_same_steps(support.train_step(model, **inputs), expected)
