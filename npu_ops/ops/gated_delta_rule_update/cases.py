"""Named shapes and tolerances of the decoding step, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.models import LINEAR_DIM, Model
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases as recurrent

TOLERANCES = recurrent.TOLERANCES  # the same arithmetic

# key heads, value heads, K, V of one rank
MODELS = recurrent.MODELS


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` of `sequences` sequences, each third of which is skipped.

    mode: "decode", "sglang" (states kept after each token, some accepted) or "vllm" (a slot for
    each token's state). packed: q, k and v in one tensor. ragged: by cu_seqlens, with an empty one.
    pool: the dtype of the states; None: fp32, or fp64 with fp64 inputs.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    sequences: int
    heads: int
    value_heads: int
    keys: int
    values: int
    mode: str = "decode"
    v_first: bool = True
    packed: bool = True
    ragged: bool = False
    pool: torch.dtype | None = None
    update: bool = True
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of the function: normal, with a bias, so that keys are alike."""
        draw = torch.Generator().manual_seed(seed)
        matrix = (self.values, self.keys) if self.v_first else (self.keys, self.values)
        tokens, rows = self._tokens, self.sequences + 2
        steps = self._steps
        slots = rows * (steps if self.mode == "vllm" else 1)

        def normal(*shape):
            return make.normal(shape, draw).to(device)

        def states(*shape):
            return normal(*shape, self.value_heads, *matrix).to(self.pool or torch.float32)

        def indices(count):
            chosen = make.shuffled(slots, draw)[:count].int()
            return chosen.to(device)

        heads = (self.heads, self.keys), (self.heads, self.keys), (self.value_heads, self.values)
        q, k, v = ((normal(tokens, *shape) + 0.5).to(dtype) for shape in heads)
        taken = indices(self.sequences * (steps if self.mode == "vllm" else 1))
        if self.mode == "vllm":
            taken = taken.view(self.sequences, steps)
        taken[1::3] = -1
        accepted = (make.counted(self.sequences) % steps).int().to(device)
        given = {
            "qkv": torch.cat([x.flatten(1) for x in (q, k, v)], 1) if self.packed else (q, k, v),
            "a": normal(tokens, self.value_heads).to(dtype),
            "b": normal(tokens, self.value_heads).to(dtype),
            "A_log": normal(self.value_heads),
            "dt_bias": normal(self.value_heads),
            "state": states(slots),
            "state_indices": taken,
            "state_v_first": self.v_first,
            "cu_seqlens": self._cu_seqlens(device),
            "disable_state_update": not self.update,
        }
        if self.mode == "vllm":
            given["num_accepted_tokens"] = accepted + 1
        if self.mode == "sglang":
            given["num_accepted_tokens"] = accepted
            given["intermediate_states"] = states(rows, steps)
            given["intermediate_state_indices"] = (
                make.counted(self.sequences).flip(0).int().to(device)
            )
        return given

    @property
    def _tokens(self) -> int:
        """All sequences have as many tokens, unless they are ragged."""
        return self.tokens if self.ragged else self._length * self.sequences

    @property
    def _length(self) -> int:
        return -(-self.tokens // self.sequences)

    @property
    def _steps(self) -> int:
        """Room for one token more than the longest sequence has."""
        if not self.ragged:
            return self._length + 1
        return 2 + self.tokens // max(1, self.sequences - 1)

    def _cu_seqlens(self, device):
        """The first sequence is empty, and the last token is of none."""
        if not self.ragged:
            return None
        last = max(0, self.tokens - 1)
        starts = (make.counted(self.sequences) * last // max(1, self.sequences - 1)).int()
        return torch.cat([starts[:1], starts]).to(device)


def model_case(model: str, batch: int, length: int, what: str, **changes) -> Case:
    name, tokens = f"{model}-b{batch}-t{length}-{what}", batch * length
    return Case(name, tokens, batch, *MODELS[model], large=batch > 1, **changes)


CASES = [
    *(
        model_case(model, batch, 1, what, pool=pool)
        for model in MODELS
        for batch in (1, 32)
        for what, pool in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ),
    model_case("qwen3.5-9b-tp1", 8, 4, "sglang", mode="sglang", update=False),
    model_case("qwen3.5-9b-tp1", 8, 4, "vllm", mode="vllm"),
    Case("decode", 7, 7, 2, 4, 16, 24),
    Case("decode-k-first", 7, 7, 2, 4, 16, 24, v_first=False),
    Case("decode-bf16-pool", 7, 7, 1, 3, 20, 12, pool=torch.bfloat16),
    Case("decode-bf16-pool-k-first", 5, 5, 1, 3, 20, 72, v_first=False, pool=torch.bfloat16),
    Case("ragged", 11, 4, 2, 2, 8, 40, ragged=True, packed=False),
    Case("ragged-k-first", 11, 4, 2, 2, 8, 40, ragged=True, v_first=False),
    Case("sglang", 20, 5, 1, 2, 16, 16, mode="sglang", update=False),
    Case("sglang-k-first", 20, 5, 1, 2, 16, 16, mode="sglang", v_first=False),
    Case("sglang-ragged", 9, 5, 1, 2, 12, 8, mode="sglang", ragged=True, pool=torch.bfloat16),
    Case("vllm", 20, 5, 1, 2, 16, 16, mode="vllm"),
    Case("vllm-ragged-k-first", 9, 5, 1, 2, 12, 8, mode="vllm", ragged=True, v_first=False),
    Case("vllm-bf16-pool", 12, 4, 1, 2, 16, 16, mode="vllm", pool=torch.bfloat16),
    Case("sglang-t17-k-first", 34, 2, 1, 2, 20, 24, mode="sglang", v_first=False),
    Case("vllm-t17", 34, 2, 1, 2, 20, 24, mode="vllm"),
    Case("wide", 2, 2, 1, 1, 256, 256),
    Case("wide-k-first", 2, 2, 1, 1, 256, 200, v_first=False, pool=torch.bfloat16),
    Case("one", 1, 1, 1, 1, 1, 1),
    Case("empty", 0, 3, 1, 2, 8, 8),
]

# There is no gradient.
DIFFERENTIABLE = ()
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3.5-9b-tp1-b1-t1-fp32", "qwen3.5-9b-tp1-b1-t1-bf16", "ragged-k-first",
    "sglang", "sglang-k-first", "vllm", "vllm-ragged-k-first", "wide",
)  # fmt: skip

CALLS = [
    Call(
        "gated_delta_rule_update",
        lambda draw: {
            "qkv": draw(2, 64), "a": draw(2, 4), "b": draw(2, 4), "A_log": draw(4),
            "dt_bias": draw(4), "state": draw(5, 4, 8, 8), "state_v_first": True,
            "state_indices": make.indices([3, 1]),
            "intermediate_states": draw(2, 1, 4, 8, 8),
        },
        writes=("state", "intermediate_states"),
    ),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """A token of one sequence, of a server's pool."""
    return [Case("decode", 1, 1, *model.linear, *[LINEAR_DIM] * 2)] if model.linear else []
