"""Named shapes and tolerances of rotary embedding, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, declined, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model
from npu_ops.ops.rope.arguments import PAIR_LAYOUTS

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype.
TOLERANCES = tolerances((2e-15, 1e-14), (1e-7, 3e-7), (3e-4, 6e-4), (2.5e-3, 5e-3))

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
    """q has `q_heads` heads and k has `k_heads`; the first `rotary_dim` elements of a head rotate.

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
        """Return arguments of `apply_rotary_pos_emb`, the same on every device.

        q and k are normal; the tables are fp32, of random positions.
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
        """Return the shape of q or k with `heads` heads."""
        sizes = dict(B=self.batch, S=self.tokens, T=self.tokens, N=heads, D=self.head_dim)
        return tuple(sizes[axis] for axis in self.layout)


def tables(positions, rotary_dim: int, theta: float, pair_layout: str, half_table: bool):
    """Return cos and sin, fp32 `[..., S, rotary_dim]` or half as wide, of positions `[..., S]`."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None] * theta ** -(exponents / rotary_dim)
    if not half_table:
        angles = widen(angles, pair_layout)
    return angles.cos().float(), angles.sin().float()


def widen(half: torch.Tensor, pair_layout: str) -> torch.Tensor:
    """Expand a half-width table to full width, in the order of the pairs."""
    if pair_layout == "half":
        return torch.cat((half, half), dim=-1)
    return half.repeat_interleave(2, dim=-1)


def model_case(model: str, tokens: int, tp: int, **changes) -> Case:
    """Return the case of one rank of a model under tensor parallelism."""
    q_heads, k_heads, *dims = MODELS[model]
    name = f"{model}-tp{tp}-t{tokens}"
    return Case(name, tokens, q_heads // tp, k_heads // tp, *dims, **changes)


def odd_case(layout: str, tokens: int, pair_layout: str) -> Case:
    """Return a case without powers of two: a batch of three, part of a head rotated."""
    name = f"odd-{layout}-t{tokens}-{pair_layout}"
    return Case(name, tokens, 5, 3, 80, 48, 1e4, 3, layout, pair_layout)


def model_cases(make, models) -> list:
    """Return cases of each model on one device and on four, from one token to a long prompt."""
    lengths = (1, 64, 512, 8192, 20480)
    return [
        make(model, tokens, tp, large=tokens > 64)
        for model, tp, tokens in itertools.product(models, (1, 4), lengths)
    ]


def half_table_case(head_dim: int, pair_layout: str) -> Case:
    """Return a case with half-width tables and one k head."""
    name = f"head-{head_dim}-{pair_layout}-half-table"
    return Case(name, 65, 3, 1, head_dim, head_dim, 1e4, 3, "BSND", pair_layout, half_table=True)


CASES = [
    *model_cases(model_case, MODELS),
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

# The arguments that have a gradient.
DIFFERENTIABLE = ("q", "k")
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.


def cos_sin(*shape):
    """Return a change: cosines and sines of another shape."""
    return {"cos": shaped(*shape), "sin": shaped(*shape)}


_OF_A_RANK = {
    "q": shaped(8, 4, 8), "k": shaped(8, 3, 8), "freqs": shaped(16, 1, 1, 8), "layout": "TND",
     "cu_seqlens": make.indices([0, 4, 16]), "cp_size": 2, "cp_rank": 1,
}  # fmt: skip
WRONG = [
    *wrong("rope", TypeError,
        ("k: got bfloat16, needs q's float32", {"k": torch.Tensor.bfloat16}),
        ("sin: got float16, needs cos's float32", {"sin": torch.Tensor.half}),
    ),
    *wrong("rope", ValueError,
        *shapes("q", "4 dimensions for layout BSND", (8,), (5, 8), (2, 5, 8), (1, 2, 5, 4, 8)),
        ("q: got shape [5, 8], needs 4 dimensions for", {"q": shaped(5, 8), "layout": None}),
        *values("layout", "one of 'BSND', 'SBND', 'BNSD', 'TND'", "BSHD", "bsnd", "", 2, ["BSND"]),
        ("q: got shape [2, 5, 4, 8], needs 3 dimensions for layout TND", {"layout": "TND"}),
        ("unsqueeze_dim: got 0, needs one of 1, 2", {"unsqueeze_dim": 0, "layout": None}),
        ("unsqueeze_dim: got 3, needs one of 1, 2", {"unsqueeze_dim": 3, "layout": None}),
        ("unsqueeze_dim: got -1, needs one of 1, 2", {"unsqueeze_dim": -1, "layout": None}),
        ("unsqueeze_dim: got 3, needs one of 1, 2", {"position_ids": 3, "layout": None}),
        *values("pair_layout", "one of 'half', 'interleaved'", "neox", "Half"),
        *values("pair_layout", "'half' or 'interleaved' (torch_npu's mode:", "interleave"),
        *values("pair_layout", "'half' or 'interleaved' (torch_npu's mode:", "interleave-half"),
        *values("pair_layout", "'half' or 'interleaved' (torch_npu's mode:", "quarter"),
        *values("pair_layout", "one of 'half', 'interleaved'", "chunked", True, None),
        *shapes("k", "q's shape [2, 5, 4, 8] except for the heads",
            (3, 5, 3, 8), (1, 5, 3, 8), (2, 6, 3, 8), (2, 4, 3, 8), (2, 5, 3, 6), (10, 3, 8),
            (2, 3, 5, 8),
        ),
        ("k: got shape [2, 3, 5, 8], needs q's", {"k": shaped(2, 3, 5, 8), "layout": "SBND"}),
        ("k: got shape [2, 3, 5, 8], needs q's", {"k": shaped(2, 3, 5, 8), "layout": "BNSD"}),
        ("sin: got shape [2, 5, 8], needs cos's shape [8]", {"cos": shaped(8)}),
        ("cos: got shape [8], needs [S, W] or [B, S, W]", cos_sin(8)),
        ("cos: got shape [2, 5, 1, 8], needs [S, W] or [B, S, W]", cos_sin(2, 5, 1, 8)),
        ("cos: got shape [3, 2, 5, 8], needs [S, W] or [B, S, W]", cos_sin(3, 2, 5, 8)),
        ("cos: got shape [2, 9, 8], needs 5 rows, one for each token of q", cos_sin(2, 9, 8)),
        ("cos: got shape [2, 4, 8], needs 5 rows, one for each token of q", cos_sin(2, 4, 8)),
        ("cos: got shape [1, 20, 8], needs 5 rows, one for each token of q", cos_sin(20, 8)),
        ("cos: got shape [3, 5, 8], needs a batch of 1 or 2", cos_sin(3, 5, 8)),
        *shapes("sin", "cos's shape [2, 5, 8]", (2, 6, 8), (2, 5, 4), (5, 8)),
        ("rotary_dim: got 10, needs an even number up to head_dim 8", cos_sin(5, 10)),
        ("rotary_dim: got 7, needs an even number up to head_dim 8", cos_sin(5, 7)),
        ("rotary_dim: got 0, needs an even number up to head_dim 8", cos_sin(5, 0)),
        ("rotary_dim: got None, needs 4 (cos is full-width, half of each head is", cos_sin(5, 4)),
        *values("rotary_dim", "an even number up to head_dim 8", 7, 0, -8, 16, 0.5, 8.0, "8"),
        ("cos: got width 8, needs rotary_dim 6 or half of it", {"rotary_dim": 6}),
        ("cos: got width 8, needs rotary_dim 2 or half of it", {"rotary_dim": 2}),
        ("cu_seqlens: got a value, needs layout TND and no", {"cu_seqlens": make.indices([0, 5])}),
        ("cos: got a tensor that requires a gradient, needs", {"cos": torch.Tensor.requires_grad_}),
        ("sin: got a tensor that requires a gradient, needs", {"sin": torch.Tensor.requires_grad_}),
    ),
    *wrong("rope_gather", ValueError,
        *shapes("position_ids", "[5] or [1, 5] or [2, 5]",
            (2, 4), (2, 6), (3, 5), (5, 2), (10,), (3, 2, 5),
        ),
    ),
    *wrong("rope_gather", ValueError,
        ("position_ids: got 1 to 20, needs 0 to 19", {"position_ids": replaced(0, 3, to=20)}),
        ("position_ids: got -1 to 15, needs 0 to 19", {"position_ids": replaced(0, 1, to=-1)}),
        ("position_ids: got 3 to 1099511627776, needs", {"position_ids": replaced(0, 1, to=2**40)}),
        ("position_ids: got 3 to 20, needs 0 to 19",
         {"position_ids": lambda x: replaced(0, 1, to=20)(x.int())}),
        reads=True),
    *wrong("rope_packed", ValueError,
        ("cu_seqlens: got 0 first and 11 last, needs 0 and up", {"cu_seqlens": replaced(2, to=11)}),
        ("cu_seqlens: got 1 first and 10 last, needs 0 and", {"cu_seqlens": replaced(0, to=1)}),
        ("cu_seqlens: got 3 first and 7 last, needs 0 and", {"cu_seqlens": make.indices([3, 7])}),
        ("cu_seqlens: got a negative length, needs", {"cu_seqlens": make.indices([0, 5, 3, 10])}),
        ("cu_seqlens: got length 8, needs at most", {"cu_seqlens": make.indices([0, 2, 10])}),
        reads=True),
    *wrong("rope_packed", ValueError,
        *shapes("cu_seqlens", "[sequences + 1]", (1,), (0,), (1, 3)),
        ("cu_seqlens: got a value, needs layout TND and no", {"position_ids": make.counted(10)}),
        ("cos: got shape [1, 7, 8], needs [T, W]", cos_sin(1, 7, 8)),
        *shapes("k", "q's shape [10, 4, 8] except for the heads", (9, 3, 8), (10, 3, 16)),
        ("cu_seqlens: got a value, needs", {"q": shaped(1, 10, 4, 8), "k": None, "layout": "BSND"}),
    ),
    *wrong("rope", ValueError,
        ("q: got an expanded tensor, needs", {"q": lambda x: x[:, :, :1].expand(2, 5, 4, 8)}),
        ("k: got an expanded tensor, needs memory for", {"k": lambda x: x[:1].expand(2, 5, 3, 8)}),
        ("inplace: got True, needs False because q requires", {"q": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because k requires", {"k": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because k", {"k": lambda x: x.requires_grad_()[:]}),
        in_place=True),
    *wrong("freqs", TypeError,
        ("k: got float16, needs q's float32", {"k": torch.Tensor.half}),
        ("mscale: got str, needs a number", {"mscale": "1.0"}),
        ("mscale: got NoneType, needs a number", {"mscale": None}),
        ("cp_size: got float, needs an int", {"cp_size": 2.0}),
        ("cp_rank: got NoneType, needs an int", {"cp_rank": None}),
    ),
    *wrong("freqs", ValueError,
        *shapes("q", "4 dimensions for layout SBND", (5, 4, 8)),
        *values("layout", "one of 'BSND', 'SBND', 'BNSD', 'TND'", "sbhd"),
        ("freqs: got shape [5, 2, 1, 8], needs a batch of 1 or 5", {"layout": "BSND"}),
        *values("pair_layout", "one of 'half', 'interleaved'", "gptj"),
        *shapes("k", "q's shape [5, 2, 4, 8] except for the heads", (5, 1, 3, 8), (6, 2, 3, 8)),
        *shapes("freqs", "[S, 1 or B, 1, R]", (5, 8), (5, 1, 8), (5, 1, 1, 1, 8), (5, 1, 4, 8)),
        *shapes("freqs", "a batch of 1 or 2", (5, 3, 1, 8)),
        *shapes("freqs", "5 rows, one for each token of q", (9, 1, 1, 8), (4, 1, 1, 8)),
        *shapes("freqs", "an even number of columns up to head_dim 8",
            (5, 1, 1, 10), (5, 1, 1, 7), (5, 1, 1, 0),
        ),
        ("freqs: got a tensor that requires a gradient, needs one that does not",
         {"freqs": torch.Tensor.requires_grad_}),
        ("cu_seqlens: got a value with layout SBND, needs TND",
         {"cu_seqlens": make.indices([0, 5])}),
    ),
    *wrong("freqs", ValueError,
        ("inplace: got True, needs False because q requires", {"q": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because k requires", {"k": torch.Tensor.requires_grad_}),
        in_place=True),
    *wrong("freqs", ValueError,
        *shapes("cu_seqlens", "[sequences + 1]", (1,), (), (1, 2)),
        ("cu_seqlens: got device meta, needs q's", {"cu_seqlens": lambda x: x.to("meta")}),
        *values("cp_rank", "0 <= cp_rank < cp_size 2", 2, -1),
        ("cp_rank: got 1, needs 0 <= cp_rank < cp_size 0", {"cp_size": 0}),
        ("cp_size: got 2 without cu_seqlens, needs 1, because freqs", {"cu_seqlens": None}),
        ("cp_rank: got 1, needs 0 <= cp_rank < cp_size 1", {"cu_seqlens": None, "cp_size": 1}),
        *shapes("freqs", "a batch of 1 or 1", (16, 2, 1, 8)),
        *shapes("freqs", "[S, 1 or B, 1, R]", (16, 1, 8)),
        ("cu_seqlens: got a value with layout SBND, needs TND",
         {"layout": "SBND", "q": shaped(8, 1, 4, 8), "k": None}),
        given=_OF_A_RANK),
    *wrong("freqs", TypeError,
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": torch.Tensor.tolist}),
        ("cu_seqlens: got float32, needs int32 or int64", {"cu_seqlens": torch.Tensor.float}),
        ("cu_seqlens: got bool, needs int32 or int64", {"cu_seqlens": torch.Tensor.bool}),
        ("cu_seqlens: got int16, needs int32 or int64", {"cu_seqlens": torch.Tensor.short}),
        given=_OF_A_RANK),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("rope", {"k": None}, {"pair_layout": "interleaved"}, {"inverse": True}),
    *options("rope", cos_sin(2, 5, 6), {"rotary_dim": 8} | cos_sin(2, 5, 4)),
    *options("rope", {"layout": "BNSD"} | cos_sin(4, 8), {"layout": "SBND"} | cos_sin(2, 8),
             given={"k": None}),
    *options("rope", {"layout": None, "unsqueeze_dim": 2}, {"layout": None, "position_ids": 2},
             {"rotary_dim": 8}, {"position_ids": make.indices([[3, 1, 4, 1, 2]])}, same=True),
    *options("rope_gather", {"position_ids": make.indices([[0, 1, 2, 3, 4], [19, 18, 0, 7, 7]])}),
    *options("rope_gather", {"position_ids": make.indices([3, 1, 4, 15, 9]).int()}, same=True),
    *options("rope_packed", {"cu_seqlens": make.indices([0, 5, 5, 10])}),
    *options("rope_packed", {"layout": "TND"}, {"cu_seqlens": make.indices([0, 3, 10]).int()},
             same=True),
    *options("freqs", {"mscale": 1.5}, {"pair_layout": "interleaved"}, {"inverse": True},
             {"k": None}, {"freqs": lambda x: x[..., :6]}, {"freqs": lambda x: x[:, :1]}),
    *options("freqs", {"layout": "SBND"}, {"mscale": 1}, {"cp_size": 1, "cp_rank": 0}, same=True),
    *options("freqs", {"cp_rank": 0}, {"max_seqlen": 16}, {"cu_seqlens": make.indices([0, 8, 16])},
             given=_OF_A_RANK),
]  # fmt: skip
# Calls that the AscendC kernel does not support.


def _wide(dim: int) -> dict:
    return {"q": shaped(2, 5, 4, dim), "k": shaped(2, 5, 3, dim)} | cos_sin(5, dim)


DECLINED = declined("rope", "ascendc",
    ("258 rotated elements are more than 256", _wide(258)), given=_wide(256),
)  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the cases of a model: its language model and, if it has one, its vision tower."""
    rotated = model.head_dim, model.rotary_dim, model.theta
    cases = [Case("text", tokens, model.heads, model.kv_heads, *rotated)]
    if model.vision:
        heads, dim = model.vision
        cases.append(Case("vision", tokens, heads, heads, dim, dim, 1e4))
    return cases
