"""torch_npu's rotary operators: results against plain PyTorch, and calls that a device rejects."""

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def rotate(x, mode):
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def inputs(*shape, dtype=torch.float32, cos=None):
    torch.manual_seed(0)
    x = torch.randn(*shape).to(dtype)
    angle = torch.randn(*(cos or shape))
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


def close(actual, expected, dtype):
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
    )


def rejected(code, sentence):
    return pytest.raises(RuntimeError, match=rf"(?s)error code is {code}.*{sentence}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(dtype, mode):
    x, cos, sin = inputs(2, 5, 3, 64, dtype=dtype, cos=(1, 5, 1, 64))
    ours = [t.npu().requires_grad_() for t in (x, cos, sin)]
    theirs = [t.float().requires_grad_() for t in (x, cos, sin)]
    expected = theirs[0] * theirs[1] + rotate(theirs[0], mode) * theirs[2]
    actual = torch_npu.npu_rotary_mul(*ours, mode)
    close(actual, expected, dtype)
    actual.float().square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, b.grad, torch.bfloat16 if dtype != torch.float32 else torch.float32)


def test_rotary_mul_is_rejected():
    x, cos, sin = (t.npu() for t in inputs(2, 5, 3, 896))
    with rejected(561002, "head dimension 896, needs less than 896"):
        torch_npu.npu_rotary_mul(x, cos, sin)
    x, cos, sin = (t.npu() for t in inputs(2, 5, 3, 64, cos=(1, 4, 1, 64)))
    with rejected(161002, "does not broadcast"):
        torch_npu.npu_rotary_mul(x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_apply_rotary_pos_emb(dtype, dim):
    q, cos, sin = inputs(2, 5, 4, dim, dtype=dtype, cos=(2, 5, 1, dim))
    k = torch.randn(2, 5, 2, dim).to(dtype)
    expected = [x.float() * cos.float() + rotate(x.float(), "half") * sin.float() for x in (q, k)]
    q_npu, k_npu = q.npu(), k.npu()
    torch_npu.npu_apply_rotary_pos_emb(q_npu, k_npu, cos.npu(), sin.npu())
    close(q_npu, expected[0], dtype)  # in place
    close(k_npu, expected[1], dtype)


def test_apply_rotary_pos_emb_is_rejected():
    def call(dim, layout="BSND", **change):
        q, cos, sin = (t.npu() for t in inputs(2, 5, 4, dim, cos=(2, 5, 1, dim)))
        torch_npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, sin, layout, **change)

    with rejected(561002, "head dimension 80, needs 64 or 128"):
        call(80)
    with rejected(161002, "only BSND and TND exist"):
        call(64, "SBND")
    with rejected(161002, "only half exists"):
        call(64, rotary_mode="interleave")


def test_interleave_rope():
    x, cos, sin = inputs(2, 3, 5, 64, dtype=torch.bfloat16, cos=(2, 1, 5, 64))
    halves = torch.cat([x[..., ::2], x[..., 1::2]], -1).float()
    expected = halves * cos.float() + rotate(halves, "half") * sin.float()
    close(torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()), expected, torch.bfloat16)
    x, cos, sin = (t.npu() for t in inputs(2, 3, 5, 64))
    with rejected(161002, "needs float16 or bfloat16"):
        torch_npu.npu_interleave_rope(x, cos, sin)


# Selects plain rope. None would do so too, but torch_npu 2.13 then passes a freed array.
NO_SECTIONS = [0, 0, 0]


def mrope(sections, **change):
    torch.manual_seed(0)
    head, rotary, plain = 128, 2 * sum(sections) or 128, sections == NO_SECTIONS
    cache = torch.randn(50, rotary)
    positions = torch.randint(0, 50, (6,) if plain else (len(sections), 6))
    q, k = torch.randn(6, 3 * head), torch.randn(6, head)
    out = torch_npu.npu_mrope(
        positions.npu(), q.npu(), k.npu(), cache.npu(), head,
        mrope_section=sections, rotary_mode="half", **change,
    )  # fmt: skip
    return cache, positions, q, k, out


def test_plain_rope_from_a_cache():
    cache, positions, q, _, (q_out, _) = mrope(NO_SECTIONS)
    cos, sin = cache[positions].chunk(2, -1)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))
    x = q.view(6, 3, 128)
    close(q_out, (x * cos + rotate(x, "half") * sin).flatten(1), torch.float32)


@pytest.mark.parametrize("cache_mode", ["default", "interleave"])
def test_mrope(cache_mode):
    sections = [24, 20, 20]
    cache, positions, q, _, (q_out, _) = mrope(sections, cache_mode=cache_mode)
    owner = torch.tensor([axis for axis, size in enumerate(sections) for _ in range(size)])
    if cache_mode == "interleave":
        owner = torch.tensor([i % 3 if i < 60 else 0 for i in range(64)])
    rows = positions[owner].t()  # [tokens, frequencies]
    columns = torch.arange(64)
    cos, sin = cache[rows, columns], cache[rows, 64 + columns]
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))
    x = q.view(6, 3, 128)
    close(q_out, (x * cos + rotate(x, "half") * sin).flatten(1), torch.float32)


def test_mrope_is_rejected():
    with rejected(561002, r"mrope_section: got \[11, 11, 10\]"):
        mrope([11, 11, 10])
