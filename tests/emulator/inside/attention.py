"""torch_npu's attention operators against plain PyTorch: layouts, masks, gradients, errors."""

import pytest
import torch
import torch_npu

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2).contiguous(),
    "BSH": lambda x: x.transpose(1, 2).flatten(2).contiguous(),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2).contiguous(),
}


def reference(q, k, v, allowed=None, scale=0.2, bias=0):
    """Compute attention in PyTorch. q: [.., N, S, D]; k, v: fewer heads; allowed: pairs in use."""
    times = q.size(-3) // k.size(-3)
    k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    scores = (q @ k.transpose(-1, -2) + bias) * scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def tensors(dtype=torch.float32, heads=4, kv=2, q_len=6, k_len=6, dim=16, batch=2):
    torch.manual_seed(0)
    return (
        torch.randn(batch, heads, q_len, dim).to(dtype),
        torch.randn(batch, kv, k_len, dim).to(dtype),
        torch.randn(batch, kv, k_len, dim).to(dtype),
    )


def close(actual, expected, dtype=torch.float32):
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
    )


def rejected(code, sentence):
    return pytest.raises(RuntimeError, match=rf"(?s)error code is {code}.*{sentence}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_layouts_and_gradients(layout, dtype):
    move = LAYOUTS[layout]
    ours = [move(t).npu().requires_grad_() for t in tensors(dtype)]
    theirs = [t.float().requires_grad_() for t in tensors(dtype)]
    mask = COMPRESSED.npu()
    out = torch_npu.npu_fusion_attention(
        *ours, 4, layout, atten_mask=mask, scale=0.2, sparse_mode=3
    )
    expected = reference(*theirs, torch.ones(6, 6, dtype=torch.bool).tril())
    close(out[0], move(expected), dtype)
    assert out[1].shape == (2, 4, 6, 8) and out[1].dtype == torch.float32
    out[0].float().square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, move(b.grad), dtype if dtype == torch.float32 else torch.bfloat16)


def test_what_is_computed_head_by_head():
    """2 x 35 million scores, so heads run one by one; the mask differs per head.

    A large scale gives weight to few keys.
    """
    given = tensors(heads=2, kv=1, q_len=5, k_len=7_000_000, dim=1, batch=1)
    left_out = torch.rand(1, 2, 5, given[1].shape[2]) < 0.5
    ours = [t.npu().requires_grad_() for t in given]
    out, *_ = torch_npu.npu_fusion_attention(
        *ours, 2, "BNSD", atten_mask=left_out.npu(), scale=8.0, sparse_mode=1
    )
    out.sum().backward()
    theirs = [t.double().requires_grad_() for t in given]
    expected = reference(*theirs, ~left_out, scale=8.0)
    expected.sum().backward()
    assert expected.abs().amax(2).min() > 0.01  # in each head
    close(out, expected, torch.float16)  # sums over millions of keys
    for mine, their in zip(ours, theirs, strict=True):
        assert their.grad.abs().max() > 0.01
        close(mine.grad, their.grad, torch.float16)


def grid(rows, columns):
    return torch.arange(columns)[None] - torch.arange(rows)[:, None]


MODES = {
    0: lambda d, shift: d <= 0,
    1: lambda d, shift: d <= 2,
    2: lambda d, shift: d <= 0,
    3: lambda d, shift: d <= shift,
    4: lambda d, shift: (d <= shift + 1) & (d >= shift - 3),
}


@pytest.mark.parametrize("lengths", [(6, 6), (4, 7)])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_modes(mode, lengths):
    q, k, v = tensors(q_len=lengths[0], k_len=lengths[1])
    allowed = MODES[mode](grid(*lengths), lengths[1] - lengths[0])
    mask = COMPRESSED if mode >= 2 else ~allowed
    tokens = {"pre_tockens": 3, "next_tockens": 1} if mode == 4 else {}
    out = torch_npu.npu_fusion_attention(
        q.npu(),
        k.npu(),
        v.npu(),
        4,
        "BNSD",
        atten_mask=mask.npu(),
        scale=0.2,
        sparse_mode=mode,
        **tokens,
    )[0]
    close(out, reference(q, k, v, allowed))


def test_no_mask_means_no_mask():
    """The vendor ignores sparse_mode without a mask, so the result is not causal."""
    q, k, v = tensors()
    out = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), 4, "BNSD", scale=0.2, sparse_mode=3
    )[0]
    close(out, reference(q, k, v))


def packed(q, k, v, ends):
    """Cut two sequences from [1, N, S, D], and return causal attention of each as TND."""
    starts = [0, *ends[:-1]]
    parts = [
        reference(
            q[0, :, a:b],
            k[0, :, a:b],
            v[0, :, a:b],
            torch.ones(b - a, b - a, dtype=torch.bool).tril(),
        )
        for a, b in zip(starts, ends, strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def test_packed_sequences_and_gradients():
    q, k, v = tensors(batch=1, q_len=7, k_len=7)
    ends = [3, 7]
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    ours = [t[0].transpose(0, 1).contiguous().npu().requires_grad_() for t in (q, k, v)]
    out = torch_npu.npu_fusion_attention(
        *ours, 4, "TND", atten_mask=COMPRESSED.npu(), scale=0.2, sparse_mode=3,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )[0]  # fmt: skip
    expected = packed(*theirs, ends)
    close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, b.grad[0].transpose(0, 1))


def test_v2_and_v3():
    q, k, v = (t.npu() for t in tensors())
    bias = torch.randn(2, 4, 6, 6)
    out = torch_npu.npu_fusion_attention_v2(
        q, k, v, 4, "BNSD", pse=bias.npu(), scale=0.2, pse_type=1
    )[0]
    close(out, reference(*tensors(), bias=bias))
    out = torch_npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.2)[0]
    close(out, reference(*tensors()))


def test_dropout_keeps_the_mean_and_repeats_in_backward():
    q = torch.zeros(1, 1, 64, 16).npu().requires_grad_()
    v = torch.ones(1, 1, 64, 16).npu().requires_grad_()
    torch.npu.manual_seed(0)
    out = torch_npu.npu_fusion_attention(q, q, v, 1, "BNSD", scale=1.0, keep_prob=0.5)[0]
    assert 0.9 < out.mean() < 1.1 and out.std() > 0.05
    out.sum().backward()
    # v's gradient sums each column's kept weights, so it shows whether the backward's mask is the
    # same.
    torch.testing.assert_close(v.grad.sum(), out.sum())


def test_is_rejected():
    def call(q, k, v, layout="BNSD", heads=4, **more):
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), heads, layout, **more)

    q, k, v = tensors()
    with rejected(561002, "needs the compressed"):
        call(q, k, v, atten_mask=torch.ones(6, 6, dtype=torch.bool).triu(1).npu(), sparse_mode=3)
    with rejected(161002, "atten_mask: got Float"):
        call(q, k, v, atten_mask=torch.zeros(6, 6).npu())
    with rejected(561002, "3 heads do not divide"):
        call(q, *(t[:, :1].repeat(1, 3, 1, 1) for t in (k, v)))
    with rejected(561002, "needs 1 to 768"):
        call(*tensors(dim=800))
    with rejected(161002, r"needs cumulative lengths"):
        call(
            *(t[0].transpose(0, 1) for t in (q, k, v)),
            "TND",
            actual_seq_qlen=[4, 2],
            actual_seq_kvlen=[4, 2],
        )


def test_what_is_not_emulated_says_so():
    """docs/evidence/emulated-npu.md lists what is not emulated."""
    q, k, v = (t.npu() for t in tensors())
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    ends = {"actual_seq_qlen": [6], "actual_seq_kvlen": [6]}
    mask = COMPRESSED.npu()
    for mode in (5, 6):
        with rejected(161002, f"sparse_mode {mode} is not emulated"):
            torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=mask, sparse_mode=mode)
    for mode in (7, 8):  # torch_npu takes these only for TND
        with rejected(161002, f"sparse_mode {mode} is not emulated"):
            torch_npu.npu_fusion_attention(
                *packed, 4, "TND", atten_mask=mask, sparse_mode=mode, **ends
            )
    bias = torch.zeros(2, 4, 6, 6).npu()
    for kind in (2, 3):
        with rejected(161002, f"pse_type {kind} is not emulated"):
            torch_npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD", pse=bias, pse_type=kind)
    with rejected(161002, "pse with TND is not emulated"):
        torch_npu.npu_fusion_attention(*packed, 4, "TND", pse=bias, **ends)
    infer, one = torch_npu.npu_fused_infer_attention_score, (q.half(), k.half(), v.half())
    heads = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.2}
    with rejected(161002, "BNSD_NBSD is not emulated"):
        infer(*one, input_layout="BNSD_NBSD", **heads)
    with rejected(161002, "quantisation, padding and shared prefixes are not emulated"):
        scale = torch.ones(1).npu()
        infer(*one, input_layout="BNSD", quant_scale2=scale, **heads)


def test_scaled_dot_product_attention():
    q, k, v = tensors(kv=4, dtype=torch.float16)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.npu(), k.npu(), v.npu(), is_causal=True, scale=0.2
    )
    close(
        out,
        reference(q.float(), k.float(), v.float(), torch.ones(6, 6, dtype=torch.bool).tril()),
        torch.float16,
    )


@pytest.mark.parametrize("version", [1, 2])
def test_inference_prefill(version):
    q, k, v = tensors(torch.float16)
    names = ("num_heads", "scale") if version == 1 else ("num_query_heads", "softmax_scale")
    function = getattr(
        torch_npu, "npu_fused_infer_attention_score" + ("" if version == 1 else "_v2")
    )
    lse = {"softmax_lse_flag": True} if version == 1 else {"return_softmax_lse": True}
    out, log_sum = function(
        q.npu(), k.npu(), v.npu(), atten_mask=COMPRESSED.npu(), input_layout="BNSD", sparse_mode=3,
        num_key_value_heads=2, **dict(zip(names, (4, 0.2), strict=True)), **lse,
    )  # fmt: skip
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    close(out, reference(q.float(), k.float(), v.float(), allowed), torch.float16)
    scores = (q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) * 0.2).masked_fill(
        ~allowed, -torch.inf
    )
    close(log_sum.squeeze(-1), scores.logsumexp(-1), torch.float16)


def test_inference_decode_with_pages():
    torch.manual_seed(0)
    lengths, block = [130, 5], 128
    cache_k, cache_v = (torch.randn(4, 2, block, 16, dtype=torch.float16) for _ in range(2))
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q = torch.randn(2, 4, 1, 16, dtype=torch.float16)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(), cache_k.npu(), cache_v.npu(), actual_seq_lengths_kv=lengths,
        block_table=table.npu(), num_heads=4, num_key_value_heads=2, input_layout="BNSD",
        block_size=block, scale=0.2,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        k, v = (
            torch.cat([c[i] for i in table[b]], 1)[:, :length].float() for c in (cache_k, cache_v)
        )
        close(out[b], reference(q[b].float(), k, v), torch.float16)


def test_prompt_and_incremental():
    q, k, v = tensors(torch.float16)
    out = torch_npu.npu_prompt_flash_attention(
        q.npu(), k.npu(), v.npu(), num_heads=4, num_key_value_heads=2, input_layout="BNSD",
        scale_value=0.2, next_tokens=65535,
    )  # fmt: skip
    close(out, reference(q.float(), k.float(), v.float()), torch.float16)
    one = q[:, :, :1]
    out = torch_npu.npu_incre_flash_attention(
        one.npu(), k.npu(), v.npu(), num_heads=4, num_key_value_heads=2, input_layout="BNSD",
        scale_value=0.2, actual_seq_lengths=[4, 6],
    )  # fmt: skip
    for b, length in enumerate((4, 6)):
        close(
            out[b],
            reference(one[b].float(), k[b, :, :length].float(), v[b, :, :length].float()),
            torch.float16,
        )
