"""Named shapes and tolerances of rotary embedding, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.compare import Tolerance
from npu_ops.core.models import Model
from npu_ops.ops.rope.arguments import PAIR_LAYOUTS

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = {
    torch.float64: Tolerance(ratio=2e-15, max_abs=1e-14),
    torch.float32: Tolerance(ratio=1e-7, max_abs=3e-7),
    torch.float16: Tolerance(ratio=3e-4, max_abs=6e-4),
    torch.bfloat16: Tolerance(ratio=2.5e-3, max_abs=5e-3),
}

# q heads, kv heads, head_dim, rotary_dim, theta
MODELS = {
    "qwen3-4b": (32, 8, 128, 128, 1e6),
    "qwen3-32b": (64, 8, 128, 128, 1e6),
    "qwen3-30b-a3b": (32, 4, 128, 128, 1e6),
    "qwen3-vl-8b": (32, 8, 128, 128, 5e6),
    "qwen3.5-9b": (16, 4, 256, 64, 1e7),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """q has `q_heads` heads and k `k_heads`, of which the first `rotary_dim` elements rotate.

    tokens: S of a batch, or T of layout TND.
    half_table: cos and sin are rotary_dim / 2 wide.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    theta: float = 1e6
    batch: int = 1
    layout: str = "TND"
    pair_layout: str = "half"
    half_table: bool = False
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `apply_rotary_pos_emb`: normal q and k, fp32 tables of random positions.

        They are the same on every device.
        """
        draw = torch.Generator().manual_seed(seed)
        shape = () if self.layout == "TND" else (self.batch,)
        positions = make.integers(32768, (*shape, self.tokens), draw)
        cos, sin = tables(positions, self.rotary_dim, self.theta, self.pair_layout, self.half_table)
        return {
            "q": make.normal(self.shape(self.q_heads), draw).to(device, dtype),
            "k": make.normal(self.shape(self.k_heads), draw).to(device, dtype),
            "cos": cos.to(device),
            "sin": sin.to(device),
            "layout": self.layout,
            "pair_layout": self.pair_layout,
            "rotary_dim": self.rotary_dim,
        }

    def shape(self, heads: int) -> tuple[int, ...]:
        """The shape of a q or k with so many heads."""
        sizes = dict(B=self.batch, S=self.tokens, T=self.tokens, N=heads, D=self.head_dim)
        return tuple(sizes[axis] for axis in self.layout)


def tables(positions, rotary_dim: int, theta: float, pair_layout: str, half_table: bool):
    """cos and sin in fp32, `[..., S, rotary_dim]` or half as wide, of positions `[..., S]`."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None] * theta ** -(exponents / rotary_dim)
    if not half_table:
        angles = widen(angles, pair_layout)
    return angles.cos().float(), angles.sin().float()


def widen(half: torch.Tensor, pair_layout: str) -> torch.Tensor:
    """A half-width table to full width, in the order of the pairs."""
    if pair_layout == "half":
        return torch.cat((half, half), dim=-1)
    return half.repeat_interleave(2, dim=-1)


def model_case(model: str, tokens: int, tp: int, **changes) -> Case:
    """One rank of a model under tensor parallelism."""
    q_heads, k_heads, *dims = MODELS[model]
    name = f"{model}-tp{tp}-t{tokens}"
    return Case(name, tokens, q_heads // tp, k_heads // tp, *dims, **changes)


def odd_case(layout: str, tokens: int, pair_layout: str) -> Case:
    """Nothing a power of two, a batch of three, part of a head rotated."""
    name = f"odd-{layout}-t{tokens}-{pair_layout}"
    return Case(name, tokens, 5, 3, 80, 48, 1e4, 3, layout, pair_layout)


def half_table_case(head_dim: int, pair_layout: str) -> Case:
    """Half-width tables, one k head."""
    name = f"head-{head_dim}-{pair_layout}-half-table"
    return Case(name, 65, 3, 1, head_dim, head_dim, 1e4, 3, "BSND", pair_layout, half_table=True)


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
    Case("qwen3-vl-8b-vision-256", 256, 16, 16, 72, 72, 1e4),
    Case("qwen3-vl-8b-vision-16384", 16384, 16, 16, 72, 72, 1e4, large=True),
    *(
        odd_case(layout, tokens, pair_layout)
        for layout in ("BSND", "SBND", "BNSD", "TND")
        for tokens, pair_layout in zip((0, 1, 63, 65, 131), itertools.cycle(PAIR_LAYOUTS))
    ),
    *(
        half_table_case(head_dim, pair_layout)
        for head_dim in (2, 72, 80, 96, 192)
        for pair_layout in PAIR_LAYOUTS
    ),
    Case("few-pairs-interleaved", 63, 3, 1, 128, 8, pair_layout="interleaved"),
    Case("one-head", 131, 1, 1, 96, 96, layout="BNSD"),
    Case("head-192-partial", 63, 2, 2, 192, 128, layout="SBND", batch=3, half_table=True),
]

# What the function is differentiable in.
DIFFERENTIABLE = ("q", "k")
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-vl-8b-tp1-t64", "qwen3.5-9b-tp4-t64", "qwen3-vl-8b-vision-256",
    "odd-BNSD-t65-interleaved", "head-96-interleaved-half-table", "few-pairs-interleaved",
)  # fmt: skip


def _call(draw):
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 5, 3, 8), "cos": draw(2, 5, 8), "sin": draw(2, 5, 8),
        "layout": "BSND",
    }  # fmt: skip


def _call_by_position(draw):
    position_ids = make.indices([[3, 1, 4, 15, 9]])
    return _call(draw) | {"cos": draw(20, 8), "sin": draw(20, 8), "position_ids": position_ids}


def _call_of_packed(draw):
    return {
        "q": draw(10, 4, 8), "k": draw(10, 3, 8), "cos": draw(7, 8), "sin": draw(7, 8),
        "cu_seqlens": make.indices([0, 3, 10]),
    }  # fmt: skip


def _call_by_freqs(draw):
    return {"q": draw(5, 2, 4, 8), "k": draw(5, 2, 3, 8), "freqs": draw(5, 2, 1, 8)}


_IN_PLACE = {"writes": ("q", "k"), "in_place": {"inplace": True}}
CALLS = [
    Call("apply_rotary_pos_emb", _call, "rope", **_IN_PLACE),
    Call("apply_rotary_pos_emb", _call_by_position, "rope_gather", **_IN_PLACE),
    Call("apply_rotary_pos_emb", _call_of_packed, "rope_packed", **_IN_PLACE),
    Call("apply_rotary_pos_emb_freqs", _call_by_freqs, "freqs", **_IN_PLACE),
]


def of_model(model: Model, tokens: int) -> list[Case]:
    """Text and, where it has one, the vision tower."""
    rotated = model.head_dim, model.rotary_dim, model.theta
    cases = [Case("text", tokens, model.heads, model.kv_heads, *rotated)]
    if model.vision:
        heads, dim = model.vision
        cases.append(Case("vision", tokens, heads, heads, dim, dim, 1e4))
    return cases
