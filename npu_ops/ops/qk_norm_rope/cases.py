"""Named shapes and tolerances of qk_norm_rope, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import MODELS, Model
from npu_ops.ops.rope.cases import cos_sin, tables

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype. The
# gradient of a weight has few elements, each a sum over tokens and heads, so the worst rounding
# alone determines its RMS error.
TOLERANCES = tolerances((1e-14, 1e-13), (2e-6, 4e-6), (5e-4, 1e-3), (4e-3, 8e-3))


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of `qk_norm_rope`: qkv is [batch, tokens, ..], or packed [tokens, ..] without batch.

    section: mrope_section of three axes; None for one axis.
    cached: pass positions and an fp32 cache instead of tables.
    half_table: cos and sin have one column for each pair.
    behind: number of elements that follow each token's qkv in the wider tensor it is a slice of.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    rotary_dim: int = 128
    theta: float = 1e6
    section: tuple[int, int, int] | None = None
    section_layout: str = "interleaved"
    gated: bool = False
    zero_centered: bool = False
    pair_layout: str = "half"
    batch: int | None = None
    cached: bool = False
    half_table: bool = False
    behind: int = 0
    copy_rest: bool = True
    large: bool = False

    @property
    def function(self) -> str:
        """The name of the public function that the case calls."""
        return "qk_norm_rope_cached" if self.cached else "qk_norm_rope"

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments: normal; weights around 1, or 0 if zero-centered; the same on every
        device."""
        draw = torch.Generator(device="cpu").manual_seed(seed)
        queries = self.num_heads * (2 if self.gated else 1)
        width = (queries + 2 * self.num_kv_heads) * self.head_dim
        tokens = (self.tokens,) if self.batch is None else (self.batch, self.tokens)
        qkv = make.normal((*tokens, width + self.behind), draw).to(device, dtype)
        weights = (make.normal((self.head_dim,), draw) / 4 for _ in range(2))
        q_weight, k_weight = (w if self.zero_centered else 1 + w for w in weights)
        given = {
            "qkv": qkv[..., :width],
            "q_weight": q_weight.to(device, dtype),
            "k_weight": k_weight.to(device, dtype),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "zero_centered": self.zero_centered,
            "gated": self.gated,
            "pair_layout": self.pair_layout,
            "rotary_dim": self.rotary_dim,
            "copy_rest": self.copy_rest,
        }
        if self.section is not None:
            given |= {"mrope_section": list(self.section), "section_layout": self.section_layout}
        return given | {n: x.to(device) for n, x in self._angles(tokens, draw).items()}

    def _angles(self, tokens: tuple[int, ...], draw: torch.Generator) -> dict:
        """Return random positions on each axis: as tables, or as positions and a cache."""
        settings = self.rotary_dim, self.theta, self.pair_layout
        axes = () if self.section is None else (3,)
        if not self.cached:
            positions = make.integers(32768, (*axes, *tokens), draw)
            cos, sin = tables(positions, *settings, self.half_table)
            return {"cos": cos, "sin": sin}
        cache = torch.cat(tables(make.counted(4096), *settings, True), -1)
        positions = make.integers(4096, (*axes, *tokens), draw)
        return {"positions": positions, "cos_sin_cache": cache}


def model_case(name: str, model: Model, tokens: int, tp: int = 1, **changes) -> Case:
    """Return the case of one rank of a model under tensor parallelism."""
    of_next = model.head_dim == 256  # Qwen3-Next and Qwen3.5
    return Case(
        name, tokens, model.heads // tp, max(1, model.kv_heads // tp), model.head_dim,
        model.rotary_dim, model.theta, model.section, model.section_layout, of_next, of_next,
        **changes,
    )  # fmt: skip


# `npu-ops doctor` checks the first case of CASES.
_NAMED = ("qwen3-8b", "qwen3-vl-8b", "qwen3.5-9b", "qwen3-next-80b-a3b")

CASES = [
    *(
        model_case(f"{name}-t{tokens}", MODELS[name], tokens, large=tokens > 64)
        for name in _NAMED
        for tokens in (1, 64, 8192)
    ),
    *(
        model_case(f"{name}-serve-t{tokens}", MODELS[name], tokens, 4, cached=True,
                   copy_rest=False, large=tokens > 64)
        for name in _NAMED[:3]
        for tokens in (1, 64, 8192)
    ),
    model_case("qwen3-vl-8b-tp8-t64", MODELS["qwen3-vl-8b"], 64, 8),
    Case("odd-t0", 0, 3, 1, 20, 12),
    Case("odd-t1-gated", 1, 3, 2, 20, 12, gated=True, zero_centered=True, behind=4),
    Case("odd-t63-gated-pairs", 63, 5, 2, 48, 32, gated=True, pair_layout="interleaved", batch=2),
    Case("odd-t65-sections", 65, 3, 3, 80, 48, section=(10, 8, 6), section_layout="chunked",
         batch=3, behind=7),
    Case("odd-t31-sections-pairs", 31, 3, 1, 24, 24, section=(4, 4, 4), pair_layout="interleaved",
         gated=True),
    Case("odd-t33-half-table", 33, 2, 1, 96, 64, half_table=True, batch=2, copy_rest=False),
    Case("odd-t7-cached-pairs", 7, 3, 1, 40, 40, cached=True, pair_layout="interleaved", batch=2),
    Case("odd-t5-cached-sections", 5, 2, 2, 72, 36, section=(8, 6, 4), cached=True, batch=2,
         zero_centered=True),
    Case("wide-512-t3", 3, 2, 1, 512, 128),
]  # fmt: skip

# The arguments that have a gradient.
DIFFERENTIABLE = ("qkv", "q_weight", "k_weight")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-8b-t64", "qwen3-vl-8b-tp8-t64", "qwen3.5-9b-t64", "qwen3-8b-serve-t64",
    "qwen3-vl-8b-serve-t64", "qwen3.5-9b-serve-t64", "odd-t63-gated-pairs", "odd-t65-sections",
    "odd-t31-sections-pairs", "odd-t33-half-table", "odd-t7-cached-pairs",
)  # fmt: skip


def _call(draw):
    return {
        "qkv": draw(2, 5, 7 * 8), "q_weight": draw(8), "k_weight": draw(8), "cos": draw(2, 5, 8),
        "sin": draw(2, 5, 8), "num_heads": 3, "num_kv_heads": 2, "eps": 0.1,
    }  # fmt: skip


def _call_gated(draw):
    return {
        "qkv": draw(5, 8 * 8), "q_weight": draw(8), "k_weight": draw(8), "cos": draw(3, 5, 3),
        "sin": draw(3, 5, 3), "num_heads": 3, "num_kv_heads": 1, "gated": True, "eps": 0.1,
        "zero_centered": True, "mrope_section": [1, 1, 1], "section_layout": "interleaved",
        "pair_layout": "interleaved", "rotary_dim": 6,
    }  # fmt: skip


def _call_by_position(draw):
    return {
        "positions": make.indices([3, 1, 4, 15, 9]), "qkv": draw(5, 5 * 8), "q_weight": draw(8),
        "k_weight": draw(8), "cos_sin_cache": draw(20, 8), "num_heads": 3, "num_kv_heads": 1,
        "eps": 0.1,
    }  # fmt: skip


CALLS = [
    Call("qk_norm_rope", _call),
    Call("qk_norm_rope", _call_gated, "qk_norm_rope_gated"),
    Call("qk_norm_rope_cached", _call_by_position, "qk_norm_rope_cached"),
]

# Invalid calls, and the error of each.
WRONG = [
    *wrong("qk_norm_rope", ValueError,
        ("qkv: got shape [2, 5, 56], needs a last dimension of 72 for 5 query", {"num_heads": 5}),
        *values("num_heads", "an integer, 1 or more", 0, True, 3.0),
        *values("num_kv_heads", "an integer, 1 or more", 0, None),
        ("qkv: got shape [2, 5, 56], needs a last dimension of 80 for 3 query", {"gated": True}),
        *shapes("k_weight", "q_weight's [8]", (7,)),
        *shapes("q_weight", "[D], the head dimension", (4, 8), (0,)),
        *shapes("qkv", "[B, S, W] or [T, W]", (56,), (1, 2, 5, 56)),
        *values("eps", "a finite number, 0 or more", -1.0, math.nan, "1"),
        ("cos: got shape [2, 5, 8], needs [3, B, S, R]", {"mrope_section": [2, 1, 1]}),
        *values("section_layout", "an mrope_section with it", "chunked"),
        *values("pair_layout", "one of 'half', 'interleaved'", "neox", None),
        *values("rotary_dim", "an even number up to head_dim 8", 10, 7),
        ("cos: got width 8, needs rotary_dim 6 or half of it", {"rotary_dim": 6}),
        ("cos: got shape [2, 5, 8, 1], needs [B, S, R]", cos_sin(2, 5, 8, 1)),
        ("cos: got shape [5, 8], needs [B, S, R]", cos_sin(5, 8)),
        ("cos: got shape [2, 6, 8], needs 5 rows, one for each token of q", cos_sin(2, 6, 8)),
        ("cos: got shape [3, 5, 8], needs a batch of 1 or 2", cos_sin(3, 5, 8)),
        ("rotary_dim: got None, needs 4 (cos is full-width, half of each head", cos_sin(2, 5, 4)),
        ("sin: got shape [2, 5, 8], needs cos's shape [5, 8]", {"cos": shaped(5, 8)}),
        ("cos: got a tensor that requires a gradient, needs", {"cos": torch.Tensor.requires_grad_}),
        ("sin: got a tensor that requires a gradient, needs", {"sin": torch.Tensor.requires_grad_}),
    ),
    *wrong("qk_norm_rope", TypeError,
        ("sin: got float16, needs cos's float32", {"sin": torch.Tensor.half}),
    ),
    *wrong("qk_norm_rope_gated", ValueError,
        *values("mrope_section", "three counts, for T, H and W", [1, 1]),
        ("mrope_section: got [1, 1, 0] with sum 2, needs the sum", {"mrope_section": [1, 1, 0]}),
        *values("mrope_section", "three counts, for T, H and W", [2, 2, -1]),
        *values("section_layout", "one of 'chunked', 'interleaved'", None, "half"),
        ("cos: got shape [2, 5, 3], needs [3, T, R]", cos_sin(2, 5, 3)),
        ("cos: got shape [5, 3], needs [3, T, R]", cos_sin(5, 3)),
    ),
    *wrong("qk_norm_rope_gated", TypeError,
        ("mrope_section: got int, needs a list of three", {"mrope_section": 3}),
    ),
    *wrong("qk_norm_rope_cached", ValueError,
        *shapes("positions", "[5]", (6,), (3, 5)),
        *shapes("cos_sin_cache", "[max_position, R] with R even", (20, 7)),
        ("rotary_dim: got None, needs the cache's width 10", {"cos_sin_cache": shaped(20, 10)}),
        ("rotary_dim: got None, needs the cache's width 0, at", {"cos_sin_cache": shaped(20, 0)}),
        *shapes("cos_sin_cache", "[max_position, R] with R even", (20,)),
        ("cos_sin_cache: got a tensor that requires a gradient, needs one that does",
         {"cos_sin_cache": torch.Tensor.requires_grad_}),
        *values("rotary_dim", "the cache's width 8, at most the head", 4),
        *values("section_layout", "an mrope_section with it", "chunked"),
    ),
    *wrong("qk_norm_rope_cached", ValueError,
        ("positions: got -1 to 15, needs 0 to 19", {"positions": replaced(1, to=-1)}),
        ("positions: got 3 to 20, needs 0 to 19", {"positions": replaced(1, to=20)}),
        reads=True),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("qk_norm_rope", {"eps": 1.0}, {"zero_centered": True}, {"pair_layout": "interleaved"},
             {"rotary_dim": 8} | cos_sin(2, 5, 4), cos_sin(1, 5, 8), cos_sin(2, 5, 6)),
    *options("qk_norm_rope", {"copy_rest": False}, {"rotary_dim": 8}, same=True),
    *options("qk_norm_rope_gated", {"section_layout": "chunked", "mrope_section": [2, 1, 0]},
             {"mrope_section": [3, 0, 0]},
             {"zero_centered": False}, {"pair_layout": "half"}, {"eps": 1.0}),
    *options("qk_norm_rope_gated", {"copy_rest": False}, {"mrope_section": [1, 1, 2]}, same=True),
    *options("qk_norm_rope_cached", {"eps": 1.0}, {"zero_centered": True},
             {"pair_layout": "interleaved"},
             {"mrope_section": [2, 1, 1], "section_layout": "chunked",
              "positions": make.indices([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [9, 9, 8, 7, 0]])}),
    *options("qk_norm_rope_cached", {"copy_rest": False}, {"rotary_dim": 8}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of the language model, with positions of three axes if it has sections."""
    if model.head_dim == 128 and model.section_layout == "chunked":
        return []  # Qwen2-VL has no norm of q and k
    return [model_case("text", model, tokens)]
