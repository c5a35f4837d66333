"""Named shapes and tolerances of multimodal rotary embedding, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.models import Model
from npu_ops.ops.rope import cases as rope

TOLERANCES = rope.TOLERANCES  # the same arithmetic

# q heads, kv heads, head_dim, rotary_dim, theta, mrope_section, section_layout
MODELS = {
    "qwen2-vl-7b": (28, 4, 128, 128, 1e6, (16, 24, 24), "chunked"),
    "qwen3-vl-8b": (32, 8, 128, 128, 5e6, (24, 20, 20), "interleaved"),
    "qwen3.5-9b": (16, 4, 256, 64, 1e7, (11, 11, 10), "interleaved"),
}


@dataclasses.dataclass(frozen=True)
class Case(rope.Case):
    """A rope case whose positions have three axes: T, H and W."""

    mrope_section: tuple[int, int, int] = (24, 20, 20)
    section_layout: str = "interleaved"

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `apply_multimodal_rotary_pos_emb`, with random positions on each axis."""
        draw = torch.Generator().manual_seed(seed + 1)
        shape = () if self.layout == "TND" else (self.batch,)
        positions = make.integers(32768, (3, *shape, self.tokens), draw)
        cos, sin = rope.tables(
            positions, self.rotary_dim, self.theta, self.pair_layout, self.half_table
        )
        return super().inputs(dtype, device, seed) | {
            "cos": cos.to(device),
            "sin": sin.to(device),
            "mrope_section": list(self.mrope_section),
            "section_layout": self.section_layout,
        }

    def cached_inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `apply_multimodal_rotary_pos_emb_cached` (layout TND); the cache is fp32."""
        draw = torch.Generator().manual_seed(seed + 1)
        cache = torch.cat(
            rope.tables(make.counted(4096), self.rotary_dim, self.theta, self.pair_layout, True), -1
        )
        qk = super().inputs(dtype, device, seed)
        return {
            "positions": make.integers(4096, (3, self.tokens), draw).to(device),
            "q": qk["q"],
            "k": qk["k"],
            "cos_sin_cache": cache.to(device),
            "mrope_section": list(self.mrope_section),
            "section_layout": self.section_layout,
            "pair_layout": self.pair_layout,
        }


def model_case(model: str, tokens: int, tp: int, **changes) -> Case:
    """One rank of a model under tensor parallelism."""
    q_heads, k_heads, head_dim, rotary_dim, theta, section, section_layout = MODELS[model]
    return Case(
        f"{model}-tp{tp}-t{tokens}", tokens, q_heads // tp, k_heads // tp, head_dim, rotary_dim,
        theta, mrope_section=section, section_layout=section_layout, **changes,
    )  # fmt: skip


def odd_case(layout: str, tokens: int, section_layout: str, pair_layout: str) -> Case:
    """Nothing a power of two, a batch of three, part of a head rotated."""
    name = f"odd-{layout}-t{tokens}-{section_layout}-sections-{pair_layout}-pairs"
    rope_part = name, tokens, 5, 3, 80, 48, 1e4, 3, layout, pair_layout
    return Case(*rope_part, mrope_section=(10, 8, 6), section_layout=section_layout)


def half_table_case(section: tuple[int, int, int], section_layout: str) -> Case:
    """Half-width tables, one k head."""
    dim = 2 * sum(section)
    rope_part = f"head-{dim}-{section_layout}-half-table", 65, 3, 1, dim, dim, 1e4, 3, "BSND"
    return Case(*rope_part, half_table=True, mrope_section=section, section_layout=section_layout)


# The fifth of five odd lengths takes the first combination again.
BOTH_LAYOUTS = list(itertools.product(("interleaved", "chunked"), ("half", "interleaved")))

CASES = [
    *(
        model_case(model, tokens, tp, large=tokens > 64)
        for model in MODELS
        for tp in (1, 4)
        for tokens in (1, 64, 512)
    ),
    *(
        model_case(model, tokens, tp, large=True)
        for model in MODELS
        for tp in (1, 4)
        for tokens in (8192, 20480)
    ),
    *(
        odd_case(layout, tokens, *layouts)
        for layout in ("BSND", "SBND", "BNSD", "TND")
        for tokens, layouts in zip((0, 1, 63, 65, 131), itertools.cycle(BOTH_LAYOUTS))
    ),
    *(
        half_table_case(section, section_layout)
        for section in ((12, 12, 12), (16, 16, 16), (36, 30, 30))
        for section_layout in ("chunked", "interleaved")
    ),
    Case(
        "few-pairs-interleaved",
        63,
        3,
        1,
        128,
        32,
        pair_layout="interleaved",
        mrope_section=(8, 4, 4),
    ),
    Case("one-axis", 63, 1, 1, 64, 64, mrope_section=(32, 0, 0)),
    Case("no-time", 63, 2, 1, 64, 64, mrope_section=(0, 16, 16), section_layout="chunked"),
]

# What the function is differentiable in.
DIFFERENTIABLE = ("q", "k")
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = ("qwen3-vl-8b-tp1-t64", "qwen3.5-9b-tp4-t64", "few-pairs-interleaved")


def _call(draw):
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 5, 3, 8), "cos": draw(3, 2, 5, 8),
        "sin": draw(3, 2, 5, 8), "layout": "BSND", "mrope_section": [2, 1, 1],
        "section_layout": "interleaved",
    }  # fmt: skip


def _call_by_position(draw):
    positions = [[3, 1, 4, 15, 9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]
    return {
        "positions": make.indices(positions),
        "q": draw(5, 4, 8), "k": draw(5, 3, 8), "cos_sin_cache": draw(20, 8),
        "mrope_section": [2, 1, 1], "section_layout": "chunked",
    }  # fmt: skip


_IN_PLACE = {"writes": ("q", "k"), "in_place": {"inplace": True}}
CALLS = [
    Call("apply_multimodal_rotary_pos_emb", _call, "mrope", **_IN_PLACE),
    Call("apply_multimodal_rotary_pos_emb_cached", _call_by_position, "cached", **_IN_PLACE),
]


def of_model(model: Model, tokens: int) -> list[Case]:
    """Text with positions of images in it."""
    if model.section is None:
        return []
    rope_part = model.heads, model.kv_heads, model.head_dim, model.rotary_dim, model.theta
    sections = {"mrope_section": model.section, "section_layout": model.section_layout}
    return [Case("text", tokens, *rope_part, **sections)]
