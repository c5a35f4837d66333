"""NPU_OPS_CONSISTENT: fused norm and rotation (server) equal the separate ops (trainer)."""

import pytest
import torch
from support import devices

import npu_ops
from npu_ops.core import env

HEADS, KEY_HEADS, DIM, TOKENS = 4, 2, 64, 21
every_device = pytest.mark.parametrize("device", [d for d in devices() if d != "cuda"])


@pytest.fixture(autouse=True)
def consistent():
    with env.override(consistent="tokens"):
        yield


def drawn(device, gated):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        x = torch.randn(shape, generator=draw, dtype=torch.float32)
        return x.to(device, torch.bfloat16)

    width = ((2 if gated else 1) * HEADS + 2 * KEY_HEADS) * DIM
    return normal(2, TOKENS, width), normal(DIM), normal(DIM)


def angles(*shape):
    positions = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(1))
    steps = 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
    return positions, positions[..., None] * steps, torch.arange(99.0)[:, None] * steps


def twice(x):
    return torch.cat((x, x), -1)


@every_device
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("section", [None, [16, 8, 8]])
@pytest.mark.parametrize("copy_rest", [False, True])
def test_it_is_the_norm_and_the_rotation(device, gated, packed, section, copy_rest):
    qkv, q_weight, k_weight = drawn(device, gated)
    qkv = qkv[0] if packed else qkv
    positions, each, every = angles(*((3,) if section else ()), *qkv.shape[:-1])
    cos, sin = (f(twice(each)).to(device, torch.bfloat16) for f in (torch.cos, torch.sin))
    cache = torch.cat((every.cos(), every.sin()), -1).to(device, torch.bfloat16)
    axes = {"mrope_section": section, "section_layout": "interleaved"} if section else {}
    more = {"num_heads": HEADS, "num_kv_heads": KEY_HEADS, "gated": gated, "copy_rest": copy_rest}
    found = npu_ops.qk_norm_rope(qkv, q_weight, k_weight, cos, sin, **axes, **more)
    cached = npu_ops.qk_norm_rope_cached(
        positions.to(device), qkv, q_weight, k_weight, cache, **axes, **more
    )

    heads = qkv.unflatten(-1, (-1, DIM))
    queries = heads[..., : HEADS * (2 if gated else 1), :]
    q, gate = (queries[..., 0::2, :], queries[..., 1::2, :]) if gated else (queries, None)
    k, v = heads[..., -2 * KEY_HEADS :, :].chunk(2, -2)
    q, k = npu_ops.rms_norm(q, q_weight), npu_ops.rms_norm(k, k_weight)
    layout = {"layout": "TND" if packed else "BSND"}
    if section:
        rotated = npu_ops.apply_multimodal_rotary_pos_emb(q, k, cos, sin, **axes, **layout)
    else:
        rotated = npu_ops.apply_rotary_pos_emb(q, k, cos, sin, **layout)
    for each, also, expected in zip(found, cached, (*rotated, v, gate), strict=True):
        assert (each is None) == (also is None) == (expected is None)
        if each is not None:
            assert torch.equal(each, expected) and torch.equal(also, expected)


def test_gradients_are_those_of_both():
    qkv, q_weight, k_weight = (x.requires_grad_() for x in drawn("cpu", gated=True))
    _, each, _ = angles(2, TOKENS)
    call = {"num_heads": HEADS, "num_kv_heads": KEY_HEADS, "gated": True}
    arguments = qkv, q_weight, k_weight, twice(each).cos(), twice(each).sin()

    def gradients():
        outputs = npu_ops.qk_norm_rope(*arguments, **call)
        return torch.autograd.grad(sum(x.float().square().sum() for x in outputs), arguments[:3])

    found = gradients()
    with env.override(consistent=""):
        expected = gradients()
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=3e-2, atol=0.3)


def test_tables_from_angles_are_rounded_as_megatron_rounds_them():
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(TOKENS, 1, HEADS, DIM, generator=draw, dtype=torch.float32).bfloat16()
    _, each, _ = angles(TOKENS)
    freqs = twice(each)[:, None, None]
    found, _ = npu_ops.apply_rotary_pos_emb_freqs(q, None, freqs)
    cos, sin = (f(freqs[:, 0, 0]).bfloat16() for f in (torch.cos, torch.sin))
    expected, _ = npu_ops.apply_rotary_pos_emb(q, None, cos, sin, layout="SBND")
    assert torch.equal(found, expected)
