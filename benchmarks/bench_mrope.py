"""Multimodal rotary embedding against the eager formula, torch.compile and a copy of the bytes."""

import torch
from npu_ops_tools.bench import Benchmark, into
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as hugging_face

import npu_ops
from npu_ops.ops.mrope import cases, reference

SECTION = [24, 20, 20]


def eager(q, k, cos, sin, mrope_section, section_layout):
    """Merge the three rows as Qwen2-VL (chunked) or Qwen3-VL (interleaved) does, then rotate."""
    merge = chunked if section_layout == "chunked" else interleaved
    return hugging_face(q, k, merge(cos, mrope_section), merge(sin, mrope_section))


def chunked(table, section):
    parts = table.split(section * 2, dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def interleaved(table, section):
    half = table.shape[-1] // 2
    merged = table[0].clone()
    for axis in (1, 2):
        for start in (0, half):
            columns = slice(start + axis, start + 3 * section[axis], 3)
            merged[..., columns] = table[axis][..., columns]
    return merged


def benchmarks(device, quick):
    for tokens in (64,) if quick else (8192, 64):
        for dtype in (torch.bfloat16, torch.float32):
            for section_layout in ("chunked", "interleaved"):
                yield forward(tokens, dtype, section_layout, device, quick)


def forward(tokens, dtype, section_layout, device, quick):
    q, k = (
        torch.randn(1, tokens, heads, 128, device=device).to(dtype).transpose(1, 2)
        for heads in (32, 8)
    )
    angles = torch.randn(3, 1, tokens, 64, device=device).repeat(1, 1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    arguments = {"mrope_section": SECTION, "section_layout": section_layout}
    chosen = {"npu_ops": npu_ops.apply_multimodal_rotary_pos_emb, "eager": eager}
    chosen |= {} if quick else {"compile": torch.compile(eager)}
    run = {name: lambda f=f: f(q, k, cos, sin, **arguments) for name, f in chosen.items()}
    run["memcpy"] = lambda: (q.clone(), k.clone())
    run["memcpy_into"] = into(q, k)

    def expected():
        settings = (None, SECTION, section_layout, "BNSD", "half", False, 128)
        return reference.mrope(q.float(), k.float(), cos, sin, *settings)

    return Benchmark(
        "mrope", f"qwen3-vl-8b-t{tokens}", f"forward {section_layout}", dtype,
        {"q": list(q.shape), "k": list(k.shape)}, run, "eager",
        2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes, expected,
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
