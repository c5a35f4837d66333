"""attention against torch's: packed images, a causal prefill, a sliding window, decoding."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Benchmark

import npu_ops
from npu_ops.ops.attention import cases

# Images of Qwen3-VL's vision tower, in patches.
IMAGES = (1024, 2048, 1296, 1024, 1600, 1024, 1296, 1024)


def benchmarks(device, quick):
    for dtype in (torch.bfloat16, torch.float32):
        yield vision(tuple(n // 16 for n in IMAGES) if quick else IMAGES, dtype, device)
        for backward in (False, True):
            yield dense("causal", 64 if quick else 2048, dtype, device, backward, None)
        yield dense("window-256", 64 if quick else 2048, dtype, device, False, (256, 0))
    yield decode(64 if quick else 4096, torch.bfloat16, device)


def benchmark(case, mode, dtype, shape, providers, moved, expected):
    return Benchmark(
        "attention", case, mode, dtype, shape, providers, "sdpa", moved, expected,
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def vision(lengths, dtype, device):
    """All images in one call, where torch wants a mask of all pairs; 16 heads of 72."""
    draw = torch.Generator().manual_seed(0)
    tokens, shape = sum(lengths), (sum(lengths), 16, 72)
    q, k, v = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(3))
    lengths = torch.tensor(lengths)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    image = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    mask = image[:, None] == image
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def ours():
        return (
            npu_ops.attention(
                q, k, v, layout="TND", cu_seqlens_q=starts.to(device), cu_seqlens_cpu=starts
            ),
        )

    def sdpa():
        return (F.scaled_dot_product_attention(*rows, attn_mask=mask)[0].transpose(0, 1),)

    def expected():
        found = [
            F.scaled_dot_product_attention(*(x[:, :, a:b].float() for x in rows))
            for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        return (torch.cat(found, 2)[0].transpose(0, 1),)

    return benchmark(
        f"vision-{len(lengths)}-images-{tokens}", "forward", dtype, {"q": list(shape)},
        {"npu_ops": ours, "sdpa": sdpa}, 4 * q.nbytes, expected,
    )  # fmt: skip


def dense(name, tokens, dtype, device, backward, window):
    """A Qwen3-8B layer's heads of one sequence."""
    case = cases.Case(name, tokens, 32, 8, 128, sequences=1, causal=True, window=window)
    inputs = case.inputs(dtype, device)
    leaves = [inputs[x].requires_grad_(backward) for x in "qkv"]
    grad = torch.ones_like(leaves[0])
    ahead = torch.arange(tokens) - torch.arange(tokens)[:, None]
    mask = None if window is None else ((ahead <= 0) & (ahead >= -window[0])).to(device)

    def step(function):
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, grad) if backward else (out,)

    def torchs(q, k, v):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            *rows, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2)

    def ours(q, k, v):
        return npu_ops.attention(q, k, v, is_causal=True, window=window)

    def expected():
        wide = [x.detach().float().requires_grad_(backward) for x in leaves]
        out = torchs(*wide)
        return torch.autograd.grad(out, wide, grad.float()) if backward else (out,)

    return benchmark(
        f"qwen3-8b-{name}-{tokens}", "forward+backward" if backward else "forward", dtype,
        {"q": list(leaves[0].shape)}, {"npu_ops": lambda: step(ours), "sdpa": lambda: step(torchs)},
        sum(x.nbytes for x in leaves) + leaves[0].nbytes, expected,
    )  # fmt: skip


def decode(keys, dtype, device):
    """One token for each of 8 sequences from a paged cache, against torch on gathered keys."""
    case = cases.Case(
        "decode", 1, 32, 8, 128, more=keys - 1, keys="paged", block_size=128, sequences=8
    )
    inputs = case.inputs(dtype, device)
    width = inputs["block_table"].shape[1] * 128
    lengths = inputs["seqlens_k"].view(-1, 1, 1, 1)
    mask = torch.arange(width, device=device) < lengths

    def sdpa():
        k, v = (inputs[x][inputs["block_table"].long()].flatten(1, 2).transpose(1, 2) for x in "kv")
        q = inputs["q"].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return (out.transpose(1, 2),)

    return benchmark(
        f"qwen3-8b-decode-{keys}", "forward", dtype, {"q": list(inputs["q"].shape)},
        {"npu_ops": lambda: (npu_ops.attention(**inputs),), "sdpa": sdpa},
        2 * inputs["k"].nbytes, sdpa,
    )  # fmt: skip
