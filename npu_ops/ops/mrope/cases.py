"""Named shapes and tolerances of multimodal rotary embedding, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.models import Model
from npu_ops.ops.rope import cases as rope
from npu_ops.ops.rope.cases import cos_sin, model_cases

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
        """Return arguments of `apply_multimodal_rotary_pos_emb`, with random positions on each
        axis."""
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
        """Return arguments of `apply_multimodal_rotary_pos_emb_cached` (TND); the cache is fp32."""
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
    """Return the case of one rank of a model under tensor parallelism."""
    q_heads, k_heads, head_dim, rotary_dim, theta, section, section_layout = MODELS[model]
    return Case(
        f"{model}-tp{tp}-t{tokens}", tokens, q_heads // tp, k_heads // tp, head_dim, rotary_dim,
        theta, mrope_section=section, section_layout=section_layout, **changes,
    )  # fmt: skip


def odd_case(layout: str, tokens: int, section_layout: str, pair_layout: str) -> Case:
    """Return a case without powers of two: a batch of three, part of a head rotated."""
    name = f"odd-{layout}-t{tokens}-{section_layout}-sections-{pair_layout}-pairs"
    rope_part = name, tokens, 5, 3, 80, 48, 1e4, 3, layout, pair_layout
    return Case(*rope_part, mrope_section=(10, 8, 6), section_layout=section_layout)


def half_table_case(section: tuple[int, int, int], section_layout: str) -> Case:
    """Return a case with half-width tables and one k head."""
    dim = 2 * sum(section)
    rope_part = f"head-{dim}-{section_layout}-half-table", 65, 3, 1, dim, dim, 1e4, 3, "BSND"
    return Case(*rope_part, half_table=True, mrope_section=section, section_layout=section_layout)


# Four combinations for five odd lengths: the fifth length uses the first combination again.
BOTH_LAYOUTS = list(itertools.product(("interleaved", "chunked"), ("half", "interleaved")))

CASES = [
    *model_cases(model_case, MODELS),
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

# The arguments that have a gradient.
DIFFERENTIABLE = ("q", "k")
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.
_PACKED = {
    "q": shaped(5, 4, 8), "k": shaped(5, 3, 8), "cos": shaped(3, 5, 8), "sin": shaped(3, 5, 8),
     "layout": "TND",
}  # fmt: skip
_FLAT = {
    "q": shaped(5, 32), "k": shaped(5, 24), "head_dim": 8,
}  # fmt: skip
_SECTIONS = [
    *values("mrope_section", "three counts, for T, H and W", [2, 2], [1, 1, 1, 1], []),
    ("mrope_section: got [1, 1, 1] with sum 3, needs the sum", {"mrope_section": [1, 1, 1]}),
    *values("mrope_section", "three counts, for T, H and W", [6, -1, -1], [2.0, 1, 1]),
    ("mrope_section: got ['2', '1', '1'], needs three counts, for", {"mrope_section": "211"}),
    *values("mrope_section", "three counts, for T, H and W", [[2, 1, 1]]),
    *values("section_layout", "one of 'chunked', 'interleaved'",
        "half", "interleave", None, True,
    ),
    *values("pair_layout", "one of 'half', 'interleaved'", "chunked"),
]  # fmt: skip
WRONG = [
    *wrong("mrope", TypeError,
        ("k: got float16, needs q's float32", {"k": torch.Tensor.half}),
        ("sin: got bfloat16, needs cos's float32", {"sin": torch.Tensor.bfloat16}),
        ("mrope_section: got NoneType, needs a list of three", {"mrope_section": None}),
        ("mrope_section: got int, needs a list of three", {"mrope_section": 4}),
    ),
    *wrong("mrope", ValueError,
        *_SECTIONS,
        ("cos: got shape [2, 5, 8], needs [3, B, S, W]", cos_sin(2, 5, 8)),
        ("cos: got shape [2, 2, 5, 8], needs [3, B, S, W]", cos_sin(2, 2, 5, 8)),
        ("cos: got shape [4, 2, 5, 8], needs [3, B, S, W]", cos_sin(4, 2, 5, 8)),
        ("cos: got shape [2, 5, 8, 3], needs [3, B, S, W]", cos_sin(2, 5, 8, 3)),
        ("cos: got shape [3, 2, 6, 8], needs 5 rows, one for each token of q", cos_sin(3, 2, 6, 8)),
        ("cos: got shape [3, 3, 5, 8], needs a batch of 1 or 2", cos_sin(3, 3, 5, 8)),
        *shapes("sin", "cos's shape [3, 2, 5, 8]", (3, 1, 5, 8)),
        ("rotary_dim: got None, needs 4 (cos is full-width, half of each", cos_sin(3, 2, 5, 4)),
        *values("rotary_dim", "an even number up to head_dim 8", 5, 10),
        *values("layout", "one of 'BSND', 'SBND', 'BNSD', 'TND'", "BHSD"),
        ("unsqueeze_dim: got 0, needs one of 1, 2", {"unsqueeze_dim": 0, "layout": None}),
        *shapes("k", "q's shape [2, 5, 4, 8] except for the heads", (2, 6, 3, 8)),
        ("q: got shape [5, 8], needs 4 dimensions for", {"q": shaped(5, 8), "layout": None}),
        ("cos: got a tensor that requires a gradient, needs", {"cos": torch.Tensor.requires_grad_}),
        ("sin: got a tensor that requires a gradient, needs", {"sin": torch.Tensor.requires_grad_}),
    ),
    *wrong("mrope", ValueError,
        ("cos: got shape [3, 1, 5, 8], needs [3, T, W]", cos_sin(3, 1, 5, 8)),
        ("cos: got shape [5, 8], needs [3, T, W]", cos_sin(5, 8)),
        ("cos: got shape [3, 1, 4, 8], needs 5 rows, one for each token of q", cos_sin(3, 4, 8)),
        *shapes("k", "q's shape [5, 4, 8] except for the heads", (6, 3, 8)),
        given=_PACKED),
    *wrong("mrope", ValueError,
        ("q: got an expanded tensor, needs memory for", {"q": lambda x: x[:1].expand(2, 5, 4, 8)}),
        ("k: got an expanded tensor, needs memory", {"k": lambda x: x[:, :1].expand(2, 5, 3, 8)}),
        ("inplace: got True, needs False because q requires", {"q": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because k requires", {"k": torch.Tensor.requires_grad_}),
        in_place=True),
    *wrong("cached", TypeError,
        ("k: got float16, needs q's float32", {"k": torch.Tensor.half}),
    ),
    *wrong("cached", ValueError,
        *_SECTIONS,
        *shapes("positions", "[5] or [3, 5]", (2, 5), (1, 5), (5, 3), (3, 4), (6,), (3, 1, 5)),
        *shapes("cos_sin_cache", "[max_position, R] with R even", (8,), (1, 20, 8), (20, 7)),
        ("rotary_dim: got None, needs the cache's width 12", {"cos_sin_cache": shaped(20, 12)}),
        ("cos_sin_cache: got a tensor that requires a gradient, needs one that does",
         {"cos_sin_cache": torch.Tensor.requires_grad_}),
        *values("rotary_dim", "the cache's width 8, at most head_dim 8", 4, 16),
        ("q: got shape [5, 4, 8], needs [T, N, D], or [T, N * D] with", {"head_dim": 16}),
        *shapes("q", "[T, N, D], or [T, N * D] with head_dim=D", (1, 5, 4, 8), (5, 32)),
        *shapes("k", "[T, N, D], or [T, N * D] with head_dim=D", (5, 24)),
        *shapes("k", "q's shape [5, 4, 8] except for the heads", (6, 3, 8), (5, 3, 16)),
    ),
    *wrong("cached", ValueError,
        ("positions: got 0 to 20, needs 0 to 19", {"positions": make.indices([0, 1, 2, 3, 20])}),
        ("positions: got -1 to 3, needs 0 to 19", {"positions": make.indices([0, 1, 2, 3, -1])}),
        ("positions: got 1 to 20, needs 0 to 19", {"positions": replaced(2, 3, to=20)}),
        reads=True),
    *wrong("cached", ValueError,
        ("q: got shape [5, 32], needs [T, N, D], or [T, N * D] with head_dim=D", {"head_dim": 12}),
        *shapes("k", "[T, N, D], or [T, N * D] with head_dim=D", (5, 20)),
        ("q: got shape [5, 32], needs [T, N, D], or [T, N * D] with head_dim=D", {"head_dim": 0}),
        *shapes("q", "[T, N, D], or [T, N * D] with head_dim=D", (32,)),
        given=_FLAT),
    *wrong("cached", ValueError,
        ("q: got an expanded tensor, needs memory for", {"q": lambda x: x[:1].expand(5, 4, 8)}),
        ("k: got an expanded tensor, needs memory for", {"k": lambda x: x[:1].expand(5, 3, 8)}),
        ("inplace: got True, needs False because q requires", {"q": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because k requires", {"k": torch.Tensor.requires_grad_}),
        in_place=True),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("mrope", {"k": None}, {"pair_layout": "interleaved"}, {"inverse": True},
             {"section_layout": "chunked"}, {"mrope_section": [4, 0, 0]},
             {"rotary_dim": 8} | cos_sin(3, 2, 5, 4), cos_sin(3, 1, 5, 8)),
    *options("mrope", {"layout": None, "unsqueeze_dim": 2}, {"rotary_dim": 8},
             {"mrope_section": [2, 1, 5]}, same=True),
    *options("mrope", {"layout": "BNSD"} | cos_sin(3, 2, 4, 8), given={"k": None}),
    *options("cached", {"k": None}, {"pair_layout": "interleaved"}, {"inverse": True},
             {"section_layout": "interleaved"}, {"mrope_section": [1, 1, 2]},
             {"positions": make.indices([3, 1, 4, 15, 9])}),
    *options("cached", {"rotary_dim": 8}, {"head_dim": 8}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of the language model, whose positions have the axes T, H and W."""
    if model.section is None:
        return []
    rope_part = model.heads, model.kv_heads, model.head_dim, model.rotary_dim, model.theta
    sections = {"mrope_section": model.section, "section_layout": model.section_layout}
    return [Case("text", tokens, *rope_part, **sections)]
