"""Named shapes and tolerances of attention."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Against fp64 on the same inputs. Implementations compute in fp32. With bf16 and fp16 they also
# round the weights before the product with the values.
TOLERANCES = tolerances((1e-13, 1e-12), (2e-6, 5e-6), (2e-3, 4e-3), (1e-2, 2e-2))


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a call: q has `tokens` tokens, k and v have `tokens + more` (more may be negative).

    keys: "dense", "padded", "paged" or "packed". Packed: `tokens` is the total of all sequences.
    sequences: number of packed sequences, whose lengths differ; otherwise the batch size.
    bias: "none", "row" (one row for all queries) or "full".
    block_size: tokens per block of a paged cache.
    """

    name: str
    tokens: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    more: int = 0
    keys: str = "dense"
    layout: str = "BSND"
    sequences: int = 2
    causal: bool = False
    top_left: bool = False
    window: tuple[int, int] | None = None
    mask: bool = False
    bias: str = "none"
    softcap: float | None = None
    sinks: bool = False
    p: float = 0.0
    block_size: int = 16
    lse: bool = False
    large: bool = False

    @property
    def differentiable(self) -> tuple[str, ...]:
        return () if self.keys == "paged" else DIFFERENTIABLE

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the arguments of `attention`, the same on every device; lengths also on
        the host."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return make.normal(shape, draw).to(device, dtype)

        keys = max(self.tokens + self.more, 0)
        dims = (self.kv_heads, self.dim), (self.kv_heads, self.value_dim or self.dim)
        inputs = {
            "q": normal(*self._tokens(self.tokens), self.heads, self.dim),
            "layout": self.layout,
            "is_causal": self.causal,
            "causal_alignment": "top_left" if self.top_left else "bottom_right",
            "window": self.window,
            "softcap": self.softcap,
            "dropout_p": self.p,
            "return_lse": self.lse,
        }
        if self.keys == "paged":
            inputs |= self._cache(keys, dims, normal, draw, device)
        else:
            inputs |= {"k": normal(*self._tokens(keys), *dims[0])}
            inputs |= {"v": normal(*self._tokens(keys), *dims[1])}
        if self.layout == "BNSD":
            inputs |= {x: inputs[x].transpose(1, 2).contiguous() for x in "qkv"}
        if self.layout == "SBND":
            inputs |= {x: inputs[x].transpose(0, 1).contiguous() for x in "qkv"}
        if self.layout == "TND":
            inputs |= self._starts(keys, device)
        if self.keys == "padded":
            lengths = [max(keys - b, 0) for b in range(self.sequences)]
            inputs |= {
                "seqlens_k": torch.tensor(lengths, device=device, dtype=torch.int64),
                "seqlens_k_cpu": lengths,
            }
        if self.mask:
            mask = make.uniform((self.sequences, 1, self.tokens, keys), draw) < 0.6
            inputs["attn_mask"] = mask.to(device)
        if self.bias != "none":
            rows = 1 if self.bias == "row" else self.tokens
            inputs["bias"] = normal(1, self.heads, rows, keys)
        if self.sinks:
            inputs["sinks"] = normal(self.heads)
        return inputs

    def _tokens(self, number: int):
        return (number,) if self.layout == "TND" else (self.sequences, number)

    def _starts(self, keys: int, device) -> dict:
        """Return the starts of packed sequences: the first is short, the last the longest."""
        n = self.sequences

        def starts(tokens):
            return [tokens * b * b // (n * n) for b in range(n + 1)]

        ends = starts(self.tokens), starts(keys)
        found = {"cu_seqlens_q": torch.tensor(ends[0], dtype=torch.int32, device=device)}
        if self.keys == "paged":
            return found | {"cu_seqlens_cpu": ends[0]}
        found["cu_seqlens_k"] = torch.tensor(ends[1], dtype=torch.int32, device=device)
        return found | {"cu_seqlens_cpu": tuple(map(torch.tensor, ends))}

    def _cache(self, keys: int, dims, normal, draw, device) -> dict:
        """Make a paged cache with shuffled blocks and sequences of different lengths."""
        lengths = [max(keys - 3 * b, 0) for b in range(self.sequences)]
        width = -(-max(keys, 1) // self.block_size)
        blocks = width * self.sequences + 1
        table = make.shuffled(blocks, draw)[: width * self.sequences]
        return {
            "k": normal(blocks, self.block_size, *dims[0]),
            "v": normal(blocks, self.block_size, *dims[1]),
            "block_table": table.view(self.sequences, width).to(device, torch.int32),
            "seqlens_k": torch.tensor(lengths, dtype=torch.int32, device=device),
            "seqlens_k_cpu": lengths,
        }


_PACKED = {"layout": "TND", "keys": "packed"}
_VISION = {"heads": 16, "kv_heads": 16, "dim": 72, **_PACKED}
_QWEN3_8B = {"heads": 32, "kv_heads": 8, "dim": 128, "causal": True}

CASES = [
    Case("causal-64", 64, causal=True),
    # Qwen3-VL's vision tower: images of 256 to 3840 patches. A patch attends to its own image.
    Case("qwen3-vl-vision-16384", 16384, sequences=8, **_VISION, large=True),
    Case("qwen3-vl-vision-200", 200, sequences=3, **_VISION),
    Case("qwen3-8b-train-4096", 4096, sequences=1, **_QWEN3_8B, large=True),
    Case("qwen3-8b-train-packed-100", 100, **_PACKED, **_QWEN3_8B),
    Case("qwen3.5-9b-prefill-90", 90, 16, 4, 256, sequences=1, causal=True),
    Case("qwen3-8b-decode", 1, more=300, keys="paged", block_size=128, **_QWEN3_8B),
    Case("qwen3-8b-verify-4", 4, more=60, keys="paged", block_size=64, **_QWEN3_8B),
    *(Case(f"layout-{layout}", 33, layout=layout, causal=True) for layout in ("BNSD", "SBND")),
    *(Case(f"dim-{dim}", 17, dim=dim, causal=True) for dim in (1, 40, 80, 96, 192, 256)),
    Case("mla-192-128", 19, 4, 4, dim=192, value_dim=128, causal=True),
    Case("tokens-0", 0),
    Case("token-1", 1, causal=True, lse=True),
    *(
        Case(
            f"{corner}-{kind}",
            37,
            more=more,
            causal=True,
            top_left=corner == "top-left",
            lse=more > 0,
        )
        for corner in ("top-left", "bottom-right")
        for kind, more in (("more-keys", 28), ("fewer-keys", -20))
    ),
    *(
        Case(
            f"window-{left}-{right}-{corner}",
            65,
            heads=2,
            kv_heads=1,
            window=(left, right),
            top_left=top,
            more=more,
        )
        for left, right in ((16, 0), (3, 5), (-1, 2), (7, -1))
        for corner, top, more in (("square", False, 0), ("top-left", True, 9))
    ),
    Case("mask", 30, mask=True, more=5),
    Case("bias-row", 33, bias="row", causal=True),
    Case("bias-full-mask", 20, bias="full", mask=True),
    Case("softcap", 33, softcap=2.0, causal=True),
    Case("sinks", 40, sinks=True, window=(9, 0), causal=True, lse=True),
    Case("dropout", 33, p=0.3, causal=True),
    Case("dropout-packed", 50, p=0.1, sequences=3, **_PACKED),
    Case("packed-causal", 64, sequences=3, causal=True, lse=True, **_PACKED),
    Case("packed-more-keys", 40, sequences=3, causal=True, more=24, **_PACKED),
    Case("packed-window", 60, sequences=3, window=(5, 0), causal=True, sinks=True, **_PACKED),
    Case("padded", 20, keys="padded", causal=True, more=7),
    Case("padded-mask", 20, keys="padded", mask=True, more=7, sinks=True, lse=True),
    Case("padded-bias", 20, keys="padded", bias="row", causal=True, more=7),
    Case("padded-bias-mask", 20, keys="padded", bias="full", mask=True, more=7),
    Case("paged-decode", 1, more=40, keys="paged", causal=True, sinks=True, lse=True),
    Case("paged-packed", 11, more=30, keys="paged", layout="TND", causal=True, lse=True),
]

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-vl-vision-200",
    "qwen3.5-9b-prefill-90",
    "mla-192-128",
    "window-3-5-top-left",
    "bias-row",
    "bias-full-mask",
    "softcap",
    "dropout",
    "packed-window",
    "paged-packed",
    "padded",
)


def _call(draw):
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 7, 2, 8), "v": draw(2, 7, 2, 8), "sinks": draw(4),
        "bias": draw(5, 7), "return_lse": True,
    }  # fmt: skip


def _call_of_packed(draw):
    return {
        "q": draw(10, 4, 8), "k": draw(10, 2, 8), "v": draw(10, 2, 8), "layout": "TND",
        "cu_seqlens_q": make.indices([0, 3, 10]),
        "is_causal": True,
    }  # fmt: skip


def _call_of_blocks(draw):
    table, lengths = [[2, 5], [1, 0]], [20, 7]
    return {
        "q": draw(2, 1, 4, 8), "k": draw(6, 16, 2, 8), "v": draw(6, 16, 2, 8),
        "block_table": make.indices(table).int(),
        "seqlens_k": make.indices(lengths),
    }  # fmt: skip


CALLS = [
    Call("attention", _call),
    Call("attention", _call_of_packed, "attention_packed"),
    Call("attention", _call_of_blocks, "attention_paged", differentiable=()),
]

# Invalid calls, and the error of each.
WRONG = [
    *wrong("attention", TypeError,
        ("k: got bfloat16, needs q's float32", {"k": torch.Tensor.bfloat16}),
        ("v: got bfloat16, needs q's float32", {"v": torch.Tensor.bfloat16}),
        ("attn_mask: got float32, needs bool, True where a", {"attn_mask": shaped(5, 7)}),
        ("attn_mask: got list, needs a tensor", {"attn_mask": [True]}),
        ("bias: got float16, needs float32", {"bias": torch.Tensor.half}),
        ("generator: got int, needs a torch.Generator", {"dropout_p": 0.1, "generator": 3}),
        *values("seqlens_k_cpu", "ints", [7, 7.0]),
    ),
    *wrong("attention", ValueError,
        *shapes("q", "4 dimensions for layout BSND", (5, 4, 8)),
        ("k: got batch 2, needs q's 3", {"q": shaped(3, 5, 4, 8)}),
        ("k: got 2 heads, needs a divisor of q's 5", {"q": shaped(2, 5, 5, 8)}),
        ("k: got head dimension 8, needs q's 16", {"q": shaped(2, 5, 4, 16)}),
        ("k: got 0 heads, needs a divisor of", {"k": shaped(2, 7, 0, 8), "v": shaped(2, 7, 0, 8)}),
        ("v: got shape [2, 2, 6, 8], needs k's [2, 2, 7] (batch", {"v": shaped(2, 6, 2, 8)}),
        ("v: got shape [2, 2, 7, 0], needs k's [2, 2, 7] (batch", {"v": shaped(2, 7, 2, 0)}),
        *values("layout", "one of 'BSND', 'BNSD', 'SBND', 'TND', 'BSH'", "BSDN", ["BSND"]),
        ("q: got shape [2, 5, 4, 8], needs [.., .., heads * head_dim] for", {"layout": "SBH"}),
        ("q: got shape [2, 5, 32], needs [.., ..", {"q": shaped(2, 5, 32), "layout": "BSH"}),
        ("q: got shape [2, 5, 32], needs [.., .., heads * head_dim] for 0 heads (BSH)",
         {"q": shaped(2, 5, 32), "layout": "BSH", "num_heads": 0}),
        ("q: got shape [2, 5, 32], needs [.., .., heads * head_dim] for 5 heads (BSH)",
         {"q": shaped(2, 5, 32), "layout": "BSH", "num_heads": 5}),
        ("q: got shape [2, 5, 32], needs [.., .., heads * head_dim] for 4.0 heads",
         {"q": shaped(2, 5, 32), "layout": "BSH", "num_heads": 4.0}),
        ("layout: got 'BSND' with cu_seqlens_q, needs 'TND'",
         {"cu_seqlens_q": make.indices([0, 5])}),
        ("cu_seqlens_k: got a value, needs cu_seqlens_q, and",
         {"cu_seqlens_k": make.indices([0, 7])}),
        *values("causal_alignment", "one of 'bottom_right', 'top_left'", "left"),
        *values("window", "(left, right), keys before and after the",
            4, (4, -2), (4, None), (4, 4, 4),
        ),
        ("attn_mask: got shape [7], needs [5, 7], or", {"attn_mask": shaped(7, dtype=torch.bool)}),
        ("attn_mask: got shape [2, 7], needs [5", {"attn_mask": shaped(2, 7, dtype=torch.bool)}),
        ("attn_mask: got shape [2, 5, 7], needs", {"attn_mask": shaped(2, 5, 7, dtype=torch.bool)}),
        ("attn_mask: got shape [2, 4, 5, 6], needs [5, 7], or [2, 4, 5, 7] where any",
         {"attn_mask": shaped(2, 4, 5, 6, dtype=torch.bool)}),
        ("attn_mask: got shape [3, 1, 5, 7], needs [5, 7], or [2, 4, 5, 7] where any",
         {"attn_mask": shaped(3, 1, 5, 7, dtype=torch.bool)}),
        ("attn_mask: got device meta, needs q's",
         {"attn_mask": shaped(5, 7, dtype=torch.bool, device="meta")}),
        ("is_causal: got a value with attn_mask, needs only one of the two",
         {"attn_mask": shaped(5, 7, dtype=torch.bool), "is_causal": True}),
        ("window: got a value with attn_mask, needs only one of the two",
         {"attn_mask": shaped(5, 7, dtype=torch.bool), "window": (1, 1)}),
        *shapes("bias", "[5, 7], or [2, 4, 5, 7] where any size may be 1", (4, 5, 7)),
        *shapes("sinks", "[4], one for each head of q", (2,)),
        *values("scale", "a finite number", math.inf, -math.inf, math.nan, "1"),
        *values("softcap", "a finite number above 0, or None", 0.0, -1.0, math.inf, "5"),
        *values("dropout_p", "0 <= dropout_p < 1", 1.0, -0.1, None),
        ("seqlens_k: got shape [1], needs [2]", {"seqlens_k": make.indices([7])}),
        ("seqlens_k: got device meta, needs q's", {"seqlens_k": make.indices([7, 7]).to("meta")}),
        ("seqlens_k_cpu: got a value, needs seqlens_k too", {"seqlens_k_cpu": [7, 7]}),
        ("seqlens_k_cpu: got device meta, needs cpu",
         {"seqlens_k_cpu": make.indices([7, 7]).to("meta")}),
        *values("max_seqlen_q", "packed sequences", 5),
        *values("max_seqlen_k", "packed sequences", 7),
        ("seqlens_k: got None, needs the number of keys of each sequence",
         {"block_table": shaped(2, 1, dtype=torch.int32)}),
        ("k: got shape [1, 2, 7, 2, 8], needs 4 dimensions for layout BSND",
         {"k": lambda x: x.unsqueeze(0), "v": lambda x: x.unsqueeze(0)}),
    ),
    *wrong("attention", ValueError,
        ("seqlens_k: got 7, needs 8 or more", {"seqlens_k": make.indices([7, 8])}),
        ("seqlens_k: got -1, needs lengths that are not", {"seqlens_k": make.indices([7, -1])}),
        reads=True),
    *wrong("attention_packed", ValueError,
        *values("cu_seqlens_q", "the starts of the sequences for layout TND", None),
        *shapes("cu_seqlens_q", "[sequences + 1]", (1,), (1, 3)),
        ("cu_seqlens_k: got shape [2], needs [3], as", {"cu_seqlens_k": make.indices([0, 10])}),
        ("cu_seqlens_k: got device meta, needs q's",
         {"cu_seqlens_k": make.indices([0, 4, 10]).to("meta")}),
        ("cu_seqlens_cpu: got shape [2], needs [3]", {"cu_seqlens_cpu": [4, 10]}),
        ("cu_seqlens_cpu: got 0 first and 11 last, needs 0", {"cu_seqlens_cpu": [0, 4, 11]}),
        ("cu_seqlens_cpu: got 0 first and 11 last, needs 0 and up to 10, the number of",
         {"cu_seqlens_cpu": ([0, 3, 10], [0, 3, 11])}),
        ("cu_seqlens_cpu: got 0 first and 10 last, needs 0 and up to 8, the number of",
         {"k": shaped(8, 2, 8), "v": shaped(8, 2, 8), "cu_seqlens_k": make.indices([0, 4, 8]),
          "cu_seqlens_cpu": [0, 3, 10]}),
        *values("max_seqlen_q", "a number of tokens", -1, 7.0),
        ("seqlens_k: got a value with packed keys, needs", {"seqlens_k": make.indices([4, 6])}),
        ("attn_mask: got a value with packed or paged tokens, needs None",
         {"attn_mask": shaped(10, 10, dtype=torch.bool)}),
        ("bias: got a value with packed or paged tokens, needs None", {"bias": shaped(10, 10)}),
    ),
    *wrong("attention_packed", ValueError,
        ("cu_seqlens_q: got 3 first and 10 last, needs", {"cu_seqlens_q": make.indices([3, 10])}),
        ("cu_seqlens_q: got 0 first and 11 last, needs 0", {"cu_seqlens_q": replaced(2, to=11)}),
        ("cu_seqlens_q: got 3 first and 7 last, needs 0", {"cu_seqlens_q": make.indices([3, 7])}),
        ("cu_seqlens_q: got a negative length, needs starts that do not decrease",
         {"cu_seqlens_q": make.indices([0, 6, 4, 10])}),
        ("cu_seqlens_k: got 0 first and 11 last, needs 0 and up to 10, the number of tokens",
         {"cu_seqlens_k": make.indices([0, 4, 11])}),
        *values("max_seqlen_q", "7 or more", 5),
        *values("max_seqlen_k", "7 or more", 5),
        *values("cu_seqlens_cpu", "the values of cu_seqlens, [0, 3, 10]", [0, 4, 10]),
        reads=True),
    *wrong("attention_packed", TypeError,
        ("cu_seqlens_k: got list, needs a tensor", {"cu_seqlens_k": [0, 4, 10]}),
        *values("cu_seqlens_cpu", "ints", [0, 4.0, 10]),
    ),
    *wrong("attention_paged", ValueError,
        *values("seqlens_k", "the number of keys of each sequence", None),
        ("seqlens_k_cpu: got shape [1], needs [2]", {"seqlens_k_cpu": [20]}),
        ("seqlens_k_cpu: got -7, needs lengths that are not negative", {"seqlens_k_cpu": [20, -7]}),
        *shapes("block_table", "[2, blocks]", (3, 2), (4,)),
        ("block_table: got a tensor with inputs that require a gradient, needs no_grad",
         {"q": torch.Tensor.requires_grad_}),
        ("block_table: got a tensor with inputs that require a gradient, needs no_grad",
         {"v": torch.Tensor.requires_grad_}),
        ("cu_seqlens_k: got a value, needs cu_seqlens_q, and",
         {"cu_seqlens_k": make.indices([0, 5])}),
        ("attn_mask: got a value with packed or paged tokens, needs None",
         {"attn_mask": shaped(1, 7, dtype=torch.bool)}),
        ("bias: got a value with packed or paged tokens, needs None", {"bias": shaped(1, 7)}),
    ),
    *wrong("attention_paged", ValueError,
        ("seqlens_k: got 32, needs 33 or more", {"seqlens_k": replaced(0, to=33)}),
        ("seqlens_k: got -1, needs lengths that are not", {"seqlens_k": replaced(0, to=-1)}),
        ("block_table: got 1 to 6, needs 0 to 5", {"block_table": replaced(0, 0, to=6)}),
        ("block_table: got -1 to 2, needs 0 to 5", {"block_table": replaced(0, 1, to=-1)}),
        reads=True),
    *wrong("attention_paged", TypeError,
        ("block_table: got int64, needs int32", {"block_table": torch.Tensor.long}),
    ),
]  # fmt: skip


def _checkered(*shape):
    """Return a change: a mask that hides every third pair of a query and a key."""
    return lambda _: make.counted(shape[0] * shape[1]).view(shape) % 3 != 0


_EQUAL = {"q": shaped(4, 4, 4, 8), "k": shaped(4, 4, 4, 8), "v": shaped(4, 4, 4, 8), "bias": None}

# Changes that every implementation must honour.
OPTIONS = [
    *options("attention", {"is_causal": True}, {"window": (1, 1)}, {"window": (2, -1)},
             {"window": (-1, 0)}, {"scale": 0.5}, {"softcap": 2.0}, {"return_lse": False},
             {"sinks": None}, {"bias": None}, {"seqlens_k": make.indices([7, 3])},
             {"bias": shaped(2, 4, 5, 7)}, {"attn_mask": _checkered(5, 7)},
             {"attn_mask": lambda _: _checkered(10, 7)(_).view(2, 1, 5, 7)}),
    *options("attention", {"causal_alignment": "top_left"}, given={"is_causal": True}),
    *options("attention", {"causal_alignment": "top_left"}, given={"window": (1, 1)}),
    *options("attention", {"window": (-1, -1)}, {"deterministic": True}, {"dropout_p": 0},
             {"layout": "BSND"}, {"scale": 8**-0.5}, {"seqlens_k": make.indices([7, 7])},
             {"seqlens_k": make.indices([7, 7]).int(), "seqlens_k_cpu": [7, 7]}, same=True),
    *options("attention", {"layout": "BNSD"}, {"layout": "SBND"}, given=_EQUAL),
    *options("attention_packed", {"is_causal": False}, {"cu_seqlens_q": make.indices([0, 6, 10])},
             {"window": (1, 0)}, {"cu_seqlens_k": make.indices([0, 5, 10])}),
    *options("attention_packed", {"cu_seqlens_cpu": [0, 3, 10]}, {"max_seqlen_q": 7},
             {"max_seqlen_k": 9}, {"cu_seqlens_k": make.indices([0, 3, 10])},
             {"cu_seqlens_cpu": ([0, 3, 10], [0, 3, 10])}, same=True),
    *options("attention_paged", {"seqlens_k": make.indices([20, 1])}, {"scale": 0.5},
             {"block_table": make.indices([[2, 4], [1, 0]]).int()}, {"softcap": 2.0}),
    *options("attention_paged", {"seqlens_k_cpu": [20, 7]}, {"is_causal": True}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return cases for a prompt, the next token and, if the model has one, the vision tower."""
    grouped = model.heads, model.kv_heads, model.head_dim
    cases = [
        Case("text", tokens, *grouped, causal=True),
        Case("decode", 1, *grouped, more=tokens - 1, causal=True),
    ]
    if model.vision:
        heads, dim = model.vision
        cases.append(Case("vision", tokens, heads, heads, dim, **_PACKED))
    return cases
