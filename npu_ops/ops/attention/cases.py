"""Named shapes and tolerances of attention."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.compare import Tolerance
from npu_ops.core.models import Model

# Against fp64 on the same inputs: fp32 arithmetic; with bf16 and fp16 also weights that are rounded
# to those before they meet the values, as everyone's are.
TOLERANCES = {
    torch.float64: Tolerance(ratio=1e-13, max_abs=1e-12),
    torch.float32: Tolerance(ratio=2e-6, max_abs=5e-6),
    torch.float16: Tolerance(ratio=2e-3, max_abs=4e-3),
    torch.bfloat16: Tolerance(ratio=1e-2, max_abs=2e-2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """q of `tokens`, k and v of `more` tokens more (fewer where negative).

    keys: "dense"; "packed": the tokens of all sequences; "padded", "paged": of each sequence.
    sequences: of packed tokens, of lengths that differ; else the batch.
    bias: "none", "row" (one for all queries) or "full". block_size: of paged keys.
    large: takes seconds.
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
        """Arguments of `attention`: the same on every device, with lengths on the host too."""
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
        """Where packed sequences start: the first is short, the last the longest."""
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
        """Blocks in any order, of sequences whose lengths differ."""
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
    # Qwen3-VL's vision tower: images of 1k to 4k patches, each to itself.
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
# Across these, every branch of the Triton kernels.
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


def of_model(model: Model, tokens: int) -> list[Case]:
    """A prompt, the token after it and, where it has one, the vision tower."""
    grouped = model.heads, model.kv_heads, model.head_dim
    cases = [
        Case("text", tokens, *grouped, causal=True),
        Case("decode", 1, *grouped, more=tokens - 1, causal=True),
    ]
    if model.vision:
        heads, dim = model.vision
        cases.append(Case("vision", tokens, heads, heads, dim, **_PACKED))
    return cases
