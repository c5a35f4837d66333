"""mrope against a second definition and transformers: layouts, positions, models."""

import itertools
import types

import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import assert_close
from npu_ops.ops.mrope.cases import CASES, TOLERANCES
from npu_ops.ops.mrope.reference import axis_of_frequency
from npu_ops.ops.rope.cases import tables

BOTH_ROUND = support.twice(TOLERANCES)


def run(function, implementation, inputs):
    with support.forced(implementation, "mrope"):
        return support.evaluate(function, inputs, ("q", "k"))


def compare(function, inputs, dtype, implementation, device, wide=torch.float64):
    expected = run(function, "reference", support.floats(inputs(dtype), wide))
    actual = run(function, implementation, inputs(dtype, device))
    assert all(value.dtype == dtype for value in actual.values())
    support.assert_all_close(actual, expected, TOLERANCES)


# Results, compared with the reference


@support.parametrize_cases([case for case in CASES if case.layout == "TND"], large=False)
@support.parametrize_dtypes()
@IMPLEMENTATIONS
def test_cached_against_reference(case, dtype, implementation, device):
    compare(cached, case.cached_inputs, dtype, implementation, device)


# A second definition: loops over tokens, frequencies and pairs


SECTIONS = [
    (24, 20, 20),
    (11, 11, 10),
    (16, 24, 24),
    (2, 1, 1),
    (3, 2, 1),
    (4, 0, 0),
    (1, 1, 1),
    (5, 0, 3),
]


def chunked_axis(j, section):
    return "T" if j < section[0] else "H" if j < section[0] + section[1] else "W"


def interleaved_axis(j, section):
    """Assign frequencies to T, H, W in turn. Once H or W has all of its own, T gets its turns."""
    owner = "THW"[j % 3]
    return owner if owner == "T" or j // 3 < section["THW".index(owner)] else "T"


AXIS = {"chunked": chunked_axis, "interleaved": interleaved_axis}


@SECTION_LAYOUTS
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_axes_of_frequencies(section, section_layout):
    actual = ["THW"[axis] for axis in axis_of_frequency(section, section_layout)]
    assert actual == [AXIS[section_layout](j, section) for j in range(sum(section))]
    if section_layout == "chunked" or section in SECTIONS[:2]:
        assert [actual.count(axis) for axis in "THW"] == list(section)


def test_axes_as_the_models_have_them():
    """Qwen3-VL: THW 20 times, then T. Qwen3.5: THW ten times, then TH. Qwen2-VL: T,
    H, W in chunks."""

    def letters(*args):
        return "".join("THW"[axis] for axis in axis_of_frequency(*args))

    assert letters((24, 20, 20), "interleaved") == "THW" * 20 + "TTTT"
    assert letters((11, 11, 10), "interleaved") == "THW" * 10 + "TH"
    assert letters((16, 24, 24), "chunked") == "T" * 16 + "H" * 24 + "W" * 24


def by_hand(x, positions, theta, section, section_layout, pair_layout):
    """Rotate one head [T, D] at positions [3, T] as complex numbers, one pair at a
    time, in fp64."""
    half = sum(section)
    out = x.double().clone()
    for t, j in itertools.product(range(x.shape[0]), range(half)):
        axis = "THW".index(AXIS[section_layout](j, section))
        one, two = (j, j + half) if pair_layout == "half" else (2 * j, 2 * j + 1)
        angle = positions[axis, t].double() * theta ** (-j / half)
        turned = torch.complex(out[t, one], out[t, two]) * torch.exp(1j * angle)
        out[t, one], out[t, two] = turned.real, turned.imag
    return out


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@PAIRS
@pytest.mark.parametrize("half_table", [True, False])
@pytest.mark.parametrize("section", [(5, 4, 3), (4, 4, 4), (12, 0, 0)], ids=str)
def test_section_and_pair_layouts(
    section, section_layout, pair_layout, half_table, implementation, device
):
    """Tests all four combinations of section layout and pair layout."""
    positions = torch.randint(50, (3, 6))
    q = torch.randn(6, 1, 28)
    cos, sin = tables(positions, 24, 1e4, pair_layout, half_table)
    with support.forced(implementation, "mrope"):
        out, _ = mrope(
            *(q.to(device), None, cos.to(device), sin.to(device), list(section)),
            section_layout=section_layout, pair_layout=pair_layout, rotary_dim=24,
        )  # fmt: skip
    expected = by_hand(q[:, 0], positions, 1e4, section, section_layout, pair_layout)
    assert_close("q", out[:, 0].cpu(), expected, BOTH_ROUND[torch.float32])


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@PAIRS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=support.named)
def test_cached_form_by_hand(section_layout, pair_layout, dtype, implementation, device):
    positions = torch.randint(50, (3, 6), dtype=dtype)
    q = torch.randn(6, 1, 28)
    cache = torch.cat(tables(torch.arange(50), 24, 1e4, "half", True), -1)
    with support.forced(implementation, "mrope"):
        out, _ = cached(
            positions.to(device),
            q.to(device),
            None,
            cache.to(device),
            [5, 4, 3],
            section_layout,
            pair_layout,
        )
    expected = by_hand(q[:, 0], positions, 1e4, (5, 4, 3), section_layout, pair_layout)
    assert_close("q", out[:, 0].cpu(), expected, BOTH_ROUND[torch.float32])


def test_the_four_combinations_differ():
    q = torch.randn(6, 1, 24)
    cache = torch.cat(tables(torch.arange(50), 24, 1e4, "half", True), -1)
    positions = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [20, 21, 22, 23, 24, 25]])
    outputs = [
        cached(positions, q, None, cache, [5, 4, 3], sections, pairs)[0]
        for sections, pairs in itertools.product(
            ("chunked", "interleaved"), ("half", "interleaved")
        )
    ]
    for a, b in itertools.combinations(outputs, 2):
        assert (a - b).abs().max() > 0.1


# Against transformers


def rotary_embedding(kind, head_dim, section, theta=1e4, **parameters):
    """Build a transformers rotary embedding module without a model."""
    rope_parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(section)}
    config = types.SimpleNamespace(
        rope_parameters=rope_parameters | parameters,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )
    return kind(config)


@pytest.mark.parametrize(
    "module, kind, head_dim, rotary_dim, section, section_layout",
    [
        (qwen2_vl, qwen2_vl.Qwen2VLRotaryEmbedding, 128, 128, (16, 24, 24), "chunked"),
        (qwen3_vl, qwen3_vl.Qwen3VLTextRotaryEmbedding, 128, 128, (24, 20, 20), "interleaved"),
        (qwen3_5, qwen3_5.Qwen3_5TextRotaryEmbedding, 256, 64, (11, 11, 10), "interleaved"),
    ],
    ids=["qwen2-vl", "qwen3-vl", "qwen3.5"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_against_transformers(module, kind, head_dim, rotary_dim, section, section_layout, batch):
    """transformers gets tables merged over the axes, npu-ops unmerged ones.

    q, k and their gradients are equal.
    """
    embedding = rotary_embedding(
        kind, head_dim, section, partial_rotary_factor=rotary_dim / head_dim
    )
    q, k = (x.transpose(1, 2) for x in qkv(batch, 13, 4, 2, head_dim))
    positions = torch.randint(1000, (3, batch, 13))
    merged = embedding(q, positions)
    expected = support.evaluate(
        lambda q, k: module.apply_rotary_pos_emb(q, k, *merged), {"q": q, "k": k}, ("q", "k")
    )
    angles = positions[..., None].float() * embedding.inv_freq
    angles = torch.cat((angles, angles), -1)
    inputs = {
        "q": q, "k": k, "cos": angles.cos(), "sin": angles.sin(),
        "mrope_section": section, "section_layout": section_layout,
    }  # fmt: skip
    support.assert_all_close(run(mrope, "cpu", inputs), expected, BOTH_ROUND)


# Layouts, heads, positions


@IMPLEMENTATIONS
@support.parametrize_dtypes()
@PAIRS
@SECTION_LAYOUTS
def test_layouts_are_equal_after_permutation(
    dtype, section_layout, pair_layout, implementation, device
):
    q, k = (x.to(device) for x in qkv(dtype=dtype, dim=20))
    cos, sin = (t.to(device) for t in axes_table(2, 9, pair_layout=pair_layout))
    keywords = {"section_layout": section_layout, "pair_layout": pair_layout}
    with support.forced(implementation, "mrope"):
        expected = mrope(q, k, cos, sin, [4, 2, 2], layout="BSND", **keywords)
        for layout, order in LAYOUTS.items():
            strided = [x.permute(order) for x in (q, k)]
            for inputs in (strided, [x.contiguous() for x in strided]):
                outputs = mrope(*inputs, cos, sin, [4, 2, 2], layout=layout, **keywords)
                for out, e in zip(outputs, expected, strict=True):
                    assert torch.equal(out, e.permute(order))
        flat = (x.flatten(0, 1) for x in (q, k))
        outputs = mrope(*flat, cos.flatten(1, 2), sin.flatten(1, 2), [4, 2, 2], **keywords)
    for x, out, e in zip((q, k), outputs, expected, strict=True):
        assert torch.equal(out, e.flatten(0, 1))
        assert torch.equal(e[..., 16:], x[..., 16:])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_unsqueeze_dim_is_hugging_faces(unsqueeze_dim):
    q, k = qkv()
    cos, sin = axes_table(2, 9)
    settings = {"section_layout": "chunked"}
    expected = mrope(q, k, cos, sin, [4, 2, 2], layout="BSND", **settings)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    outputs = mrope(q, k, cos, sin, [4, 2, 2], unsqueeze_dim, **settings)
    for out, e in zip(outputs, expected, strict=True):
        assert torch.equal(out.transpose(1, 2) if unsqueeze_dim == 1 else out, e)


def test_a_batch_shares_a_table_of_one():
    q, k = qkv(3)
    cos, sin = axes_table(1, 9)
    settings = {"layout": "BSND", "section_layout": "interleaved"}
    shared = mrope(q, k, cos, sin, [4, 2, 2], **settings)
    own = mrope(q, k, cos.expand(3, 3, 9, 16), sin.expand(3, 3, 9, 16), [4, 2, 2], **settings)
    for a, e in zip(shared, own, strict=True):
        assert torch.equal(a, e)


@IMPLEMENTATIONS
@pytest.mark.parametrize("k_heads", [0, 1, 4, 7])
def test_k_may_have_any_number_of_heads(k_heads, implementation, device):
    q, k = (x.to(device) for x in qkv(k_heads=k_heads))
    cos, sin = (t.to(device) for t in axes_table(2, 9))
    settings = {"layout": "BSND", "section_layout": "chunked"}
    with support.forced(implementation, "mrope"):
        both = mrope(q, k, cos, sin, [4, 2, 2], **settings)
        alone = [mrope(x, None, cos, sin, [4, 2, 2], **settings) for x in (q, k)]
    for out, (one, none) in zip(both, alone, strict=True):
        assert none is None and torch.equal(out, one)


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@PAIRS
@pytest.mark.parametrize("half_table", [True, False])
@pytest.mark.parametrize("inverse", [True, False])
def test_equal_axes_are_plain_rope_exactly(
    section_layout, pair_layout, half_table, inverse, implementation, device
):
    q, k = (x.to(device) for x in qkv(dim=24, dtype=torch.bfloat16))
    table = tables(torch.randint(1000, (2, 9)), 16, 1e4, pair_layout, half_table)
    cos, sin = (t.to(device) for t in table)
    settings = {"layout": "BSND", "pair_layout": pair_layout, "rotary_dim": 16, "inverse": inverse}
    with support.forced(implementation, "mrope", "rope"):
        expected = npu_ops.apply_rotary_pos_emb(q, k, cos, sin, **settings)
        actual = mrope(
            q, k, cos.expand(3, *cos.shape), sin.expand(3, *sin.shape), [4, 2, 2],
            section_layout=section_layout, **settings,
        )  # fmt: skip
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@PAIRS
def test_cached_text_positions_are_plain_rope_exactly(
    section_layout, pair_layout, implementation, device
):
    q, k = (x[0].to(device) for x in qkv(dim=24))
    cos, sin = (t.to(device) for t in tables(torch.arange(50), 16, 1e4, pair_layout, True))
    cache, positions = torch.cat((cos, sin), -1), torch.randint(50, (9,), device=device)
    with support.forced(implementation, "mrope", "rope"):
        text = cached(positions, q, k, cache, [4, 2, 2], section_layout, pair_layout)
        three = cached(positions.expand(3, 9), q, k, cache, [4, 2, 2], section_layout, pair_layout)
        plain = npu_ops.apply_rotary_pos_emb(
            q, k, cos, sin, positions, pair_layout=pair_layout, rotary_dim=16
        )
    for a, b, e in zip(text, three, plain, strict=True):
        assert torch.equal(a, e) and torch.equal(b, e)


@IMPLEMENTATIONS
@SECTION_LAYOUTS
@PAIRS
def test_cached_form_is_the_form_with_tables(section_layout, pair_layout, implementation, device):
    """The cached form also takes q and k with flattened heads, as serving engines have them."""
    q, k = (x[0].to(device) for x in qkv())
    cos, sin = (t.to(device) for t in tables(torch.arange(50), 16, 1e4, pair_layout, True))
    positions = torch.randint(50, (3, 9), device=device)
    with support.forced(implementation, "mrope"):
        expected = mrope(
            q, k, cos[positions], sin[positions], [4, 2, 2], section_layout=section_layout,
            pair_layout=pair_layout, rotary_dim=16,
        )  # fmt: skip
        args = torch.cat((cos, sin), -1), [4, 2, 2], section_layout, pair_layout
        actual = cached(positions, q, k, *args)
        flat = cached(positions, q.flatten(1), k.flatten(1), *args, head_dim=16)
    for a, f, e in zip(actual, flat, expected, strict=True):
        assert torch.equal(a, e) and torch.equal(f, e.flatten(1))


@IMPLEMENTATIONS
def test_cached_form_without_k_and_with_a_tail(implementation, device):
    q = torch.randn(5, 3, 24, device=device)
    cache = torch.cat(tables(torch.arange(50), 16, 1e4, "half", True), -1).to(device)
    positions = torch.randint(50, (3, 5), device=device)
    with support.forced(implementation, "mrope"):
        out, none = cached(positions, q, None, cache, [4, 2, 2], "interleaved", rotary_dim=16)
        alone, _ = cached(positions, q[..., :16], None, cache, [4, 2, 2], "interleaved")
    assert none is None
    assert torch.equal(out, torch.cat((alone, q[..., 16:]), -1))


@pytest.mark.parametrize(
    "positions", [torch.zeros(0, dtype=torch.long), torch.zeros(3, 0, dtype=torch.long)]
)
def test_cached_form_of_no_tokens(positions):
    q, cache = torch.randn(0, 3, 16), torch.randn(50, 16)
    assert cached(positions, q, q, cache, [4, 2, 2], "chunked")[1].shape == q.shape
    flat = cached(positions, q.flatten(1), None, cache, [4, 2, 2], "chunked", head_dim=16)[0]
    assert flat.shape == (0, 48)


def test_three_tokens_of_text_are_not_three_axes():
    """positions [3] of three text tokens differ from positions [3, 3] of three axes."""
    q, cache = torch.randn(3, 1, 16), torch.cat(tables(torch.arange(50), 16, 1e4, "half", True), -1)
    text = torch.tensor([3, 7, 11])
    expected = cached(text.expand(3, 3), q, None, cache, [4, 2, 2], "chunked")[0]
    assert torch.equal(cached(text, q, None, cache, [4, 2, 2], "chunked")[0], expected)
    transposed = cached(text[:, None].expand(3, 3), q, None, cache, [4, 2, 2], "chunked")[0]
    assert not torch.equal(transposed, expected)


@pytest.mark.parametrize("call", ["tables", "cached"])
def test_slices_are_read_in_place(call):
    """No operator copies, forward or backward, and only the outputs are allocated."""
    q, k, _ = torch.randn(64, 8 + 2 + 2, 16).split((8, 2, 2), dim=1)
    q, k = (x.detach().requires_grad_() for x in (q, k))
    cos, sin = axes_table(64)
    cache, positions = torch.randn(50, 16), torch.randint(50, (3, 64))

    def function():
        if call == "cached":
            return cached(positions, q, k, cache, [4, 2, 2], "chunked")
        return mrope(q, k, cos, sin, [4, 2, 2], section_layout="interleaved")

    size = (q.numel() + k.numel()) * 4
    with support.copies() as forward, env.override(strict=True):
        outputs = function()
    grads = [torch.randn_like(out) for out in outputs]
    with support.copies() as backward, env.override(strict=True):
        torch.autograd.grad(outputs, (q, k), grads)
    read = 5 * positions.nbytes if call == "cached" else 0  # checking position values allocates
    for seen in (forward, backward):
        assert seen.operators == []
        assert size <= seen.allocated <= size + read + 1000


def test_gradients_of_any_strides_take_the_native_kernel():
    q, k = (x.requires_grad_() for x in qkv())
    outputs = mrope(q, k, *axes_table(2, 9), [4, 2, 2], section_layout="chunked", layout="BSND")
    with env.override(strict=True):
        for gradient in torch.autograd.grad([out.sum() for out in outputs], (q, k)):
            assert gradient.isfinite().all()


# Properties


@st.composite
def calls(draw):
    """Draw valid arguments of mrope, in fp32, with both table widths."""
    section_layout = draw(st.sampled_from(["chunked", "interleaved"]))
    t, h, w = (draw(st.integers(low, 7)) for low in (1, 0, 0))
    # the last frequency of each axis, 3n + axis, must be below t + h + w
    if section_layout == "interleaved":
        h, w = min(h, t), min(h, w, t)
        t += h - w
    half_table, pair_layout = draw(st.booleans()), draw(st.sampled_from(["half", "interleaved"]))
    batch, tokens, heads = (draw(st.integers(1, n)) for n in (3, 12, 4))
    rotary_dim, tail = 2 * (t + h + w), draw(st.integers(0, 5))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    positions = torch.randint(100_000, (3, batch, tokens), generator=source)
    cos, sin = tables(positions, rotary_dim, 1e4, pair_layout, half_table)
    order = LAYOUTS[layout := draw(st.sampled_from(list(LAYOUTS)))]
    return {
        "q": torch.randn(batch, tokens, heads, rotary_dim + tail, generator=source).permute(order),
        "k": None, "cos": cos, "sin": sin, "mrope_section": [t, h, w], "layout": layout,
        "section_layout": section_layout, "pair_layout": pair_layout, "rotary_dim": rotary_dim,
    }  # fmt: skip


@given(calls())
@settings(max_examples=100, deadline=None)
def test_norms_are_kept_and_the_inverse_undoes(inputs):
    q = inputs["q"]
    out, _ = mrope(**inputs)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=1e-6)
    back, _ = mrope(**inputs | {"q": out}, inverse=True)
    torch.testing.assert_close(back, q, rtol=1e-5, atol=2e-6)


@given(calls())
@settings(max_examples=100, deadline=None)
def test_native_is_the_reference(inputs):
    with support.forced("cpu", "mrope"):
        actual, _ = mrope(**inputs)
    with support.forced("reference", "mrope"):
        expected, _ = mrope(**support.floats(inputs, torch.float64))
    assert_close("q", actual, expected, BOTH_ROUND[torch.float32])


# Models


def text_config(kind, **changes):
    return kind(
        vocab_size=61, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **changes,
    )  # fmt: skip


def qwen3_vl_text():
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    config = text_config(qwen3_vl.Qwen3VLTextConfig, head_dim=32, rope_parameters=parameters)
    return qwen3_vl, qwen3_vl.Qwen3VLTextModel(config), "Qwen3VLTextRotaryEmbedding", "interleaved"


def qwen2_vl_text():
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = text_config(qwen2_vl.Qwen2VLTextConfig, rope_parameters=parameters)
    return qwen2_vl, qwen2_vl.Qwen2VLTextModel(config), "Qwen2VLRotaryEmbedding", "chunked"


@pytest.mark.parametrize("make", [qwen3_vl_text, qwen2_vl_text])
def test_model_with_our_mrope(make, monkeypatch):
    """With tables unmerged over the axes, our mrope gives the same hidden states and gradients."""
    torch.manual_seed(0)
    module, model, embedding, section_layout = make()
    section = model.config.rope_parameters["mrope_section"]
    positions = torch.randint(50, (3, 2, 13))
    inputs = {"input_ids": torch.randint(61, (2, 13)), "position_ids": positions}
    expected = support.train_step(model, **inputs)
    monkeypatch.setattr(
        getattr(module, embedding),
        "recomposition_frequencies",
        lambda self, f: torch.cat((f, f), -1),
    )
    monkeypatch.setattr(
        module, "apply_rotary_pos_emb",
        lambda q, k, cos, sin: mrope(q, k, cos, sin, section, section_layout=section_layout),
    )  # fmt: skip
    with env.override(strict=True):
        actual = support.train_step(model, **inputs)
    support.assert_same_steps(actual, expected)


# Sections with a sum above the number of frequencies


@pytest.mark.parametrize(
    "sections, layout, frequencies, filled",
    [
        ([32, 32, 32], "chunked", 64, [32, 32, 0]),  # vllm-ascend's test of vLLM's kernel
        ([32, 48, 48], "interleaved", 64, [22, 21, 21]),  # from sgl-kernel-npu's test
        ([32, 48, 48], "chunked", 64, [32, 32, 0]),
        ([70, 1, 1], "chunked", 64, [64, 0, 0]),
        ([2, 60, 20], "interleaved", 64, [23, 21, 20]),
    ],
)
def test_sections_end_with_the_frequencies(sections, layout, frequencies, filled):
    """Both functions assign frequencies to axes as the masks in vLLM's kernel do."""
    frequency = torch.arange(frequencies)
    if layout == "interleaved":
        is_h = (frequency % 3 == 1) & (frequency <= 3 * sections[1])
        is_w = (frequency % 3 == 2) & (frequency <= 3 * sections[2])
    else:
        is_h = (frequency >= sections[0]) & (frequency < sections[0] + sections[1])
        is_w = frequency >= sections[0] + sections[1]
    positions, q = torch.randint(9, (3, 5)), torch.randn(5, 2, 2 * frequencies)
    cache = torch.randn(9, 2 * frequencies)
    axis = is_h.long() + 2 * is_w.long()
    cos, sin = (table[positions[axis].T, frequency] for table in cache.chunk(2, -1))
    expected, _ = npu_ops.apply_rotary_pos_emb(q, None, cos, sin, rotary_dim=2 * frequencies)
    for each in (sections, filled):
        actual, _ = npu_ops.apply_multimodal_rotary_pos_emb_cached(
            positions, q, None, cache, each, layout
        )
        torch.testing.assert_close(actual, expected)
    tables = (table[positions] for table in cache.chunk(2, -1))
    actual, _ = npu_ops.apply_multimodal_rotary_pos_emb(
        q, None, *tables, sections, section_layout=layout, rotary_dim=2 * frequencies
    )
    torch.testing.assert_close(actual, expected)


def test_sections_that_leave_frequencies_to_nobody_are_refused():
    for layout in ("chunked", "interleaved"):
        with pytest.raises(ValueError, match="^mrope_section: got .* needs the sum 64 or more"):
            npu_ops.apply_multimodal_rotary_pos_emb_cached(
                torch.zeros(3, 5).long(), torch.randn(5, 2, 128), None, torch.randn(9, 128),
                [20, 20, 20], layout,
            )  # fmt: skip
