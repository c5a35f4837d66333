"""Named shapes and tolerances of the decoding step, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import (
    Call,
    cast,
    declined,
    options,
    replaced,
    shaped,
    shapes,
    values,
    wrong,
)
from npu_ops.core.models import LINEAR_DIM, Model
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases as recurrent

TOLERANCES = recurrent.TOLERANCES  # the same arithmetic

# key heads, value heads, K and V of one rank
MODELS = recurrent.MODELS


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` tokens in `sequences` sequences, every third of which is skipped.

    mode: "decode", "sglang" (intermediate states, some tokens accepted) or "vllm" (a slot for the
    state after each token).
    packed: q, k and v are in one tensor.
    ragged: lengths differ and are given by cu_seqlens; the first sequence is empty.
    pool: the dtype of the states; None: fp32.
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
        """Return arguments of the function: normal, with a bias, so that keys are correlated."""
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
        """Return the number of all tokens: sequences are of equal length unless they are ragged."""
        return self.tokens if self.ragged else self._length * self.sequences

    @property
    def _length(self) -> int:
        return -(-self.tokens // self.sequences)

    @property
    def _steps(self) -> int:
        """Return the largest number of intermediate states: longest sequence plus one token."""
        if not self.ragged:
            return self._length + 1
        return 2 + self.tokens // max(1, self.sequences - 1)

    def _cu_seqlens(self, device):
        """Make ragged starts: the first sequence is empty, the last token is in no sequence."""
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

# The function has no gradient.
DIFFERENTIABLE = ()
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.


def _split(*parts):
    """Return a change that passes q, k and v separately, each made by a function of `parts`."""
    return lambda right: tuple(part(right) for part in parts)


_BY_TOKEN = {
    "qkv": shaped(4, 64), "a": shaped(4, 4), "b": shaped(4, 4), "intermediate_states": None,
     "state_indices": make.indices([[3, 2], [1, -1]]), "num_accepted_tokens": make.indices([2, 1]),
}  # fmt: skip
WRONG = [
    *wrong("gated_delta_rule_update", ValueError,
        ("qkv: got shape [2, 63], needs [tokens, 2 * H * 8 + 32]", {"qkv": lambda x: x[:, :-1]}),
        *shapes("qkv", "[tokens, 2 * H * 8 + 32], H a divisor of 4", (2, 32), (2, 80), (64,)),
        ("q: got shape [2, 3, 8], needs [tokens, H, 8], H a divisor of 4",
         {"qkv": _split(shaped(2, 3, 8), shaped(2, 3, 8), shaped(2, 4, 8))}),
        ("q: got shape [2, 2, 7], needs [tokens, H, 8], H a divisor of 4",
         {"qkv": _split(shaped(2, 2, 7), shaped(2, 2, 8), shaped(2, 4, 8))}),
        ("v: got shape [2, 4, 7], needs [2, 4, 8]",
         {"qkv": _split(shaped(2, 2, 8), shaped(2, 2, 8), shaped(2, 4, 7))}),
        ("k: got shape [2, 1, 8], needs [2, 2, 8]",
         {"qkv": _split(shaped(2, 2, 8), shaped(2, 1, 8), shaped(2, 4, 8))}),
        ("qkv: got a tensor that requires a gradient, needs torch.no_grad()",
         {"qkv": torch.Tensor.requires_grad_}),
        *shapes("a", "[2, 4]", (1, 4), (2, 3)),
        *shapes("b", "[2, 4]", (2, 3)),
        *shapes("A_log", "[4]", (3,)),
        ("A_log: got a tensor that requires a gradient, needs torch.no_grad()",
         {"A_log": torch.Tensor.requires_grad_}),
        *shapes("dt_bias", "[4]", (4, 1)),
        *shapes("state", "[slots, HV, V, K], K and V up to 256", (4, 8, 8)),
        ("qkv: got shape [2, 64], needs [tokens, 2 * H * 6 + 32]", {"state": shaped(5, 4, 8, 6)}),
        ("qkv: got shape [2, 64], needs", {"state": shaped(5, 4, 6, 8), "state_v_first": False}),
        ("state: got strides [64, 320, 8, 1], needs contiguous states that do",
         {"state": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("state: got strides [0, 64, 8, 1], needs contiguous states that do",
         {"state": lambda x: x[:1].expand(5, -1, -1, -1)}),
        ("state: got a tensor that requires a gradient, needs torch.no_grad()",
         {"state": torch.Tensor.requires_grad_}),
        ("state_indices: got 0 sequences, needs a divisor of 2", {"state_indices": shaped(0)}),
        ("state_indices: got 3 sequences, needs a divisor of 2", {"state_indices": shaped(3)}),
        ("state_indices: got shape [2, 1, 1], needs [N] or [N, S]",
         {"state_indices": lambda x: x[:, None, None]}),
        ("cu_seqlens: got shape [2], needs [3]", {"cu_seqlens": make.indices([0, 2])}),
        ("num_accepted_tokens: got shape [1], needs [2]",
         {"num_accepted_tokens": make.indices([0])}),
        ("num_accepted_tokens: got a tensor, needs intermediate_states",
         {"num_accepted_tokens": make.indices([0, 0]), "intermediate_states": None}),
        *shapes("intermediate_states", "[rows, T, *[4, 8, 8]]", (2, 1, 4, 8, 6)),
        *shapes("intermediate_states", "at least 2 rows, one per sequence", (1, 1, 4, 8, 8)),
        *shapes("intermediate_states", "[rows, T, *[4, 8, 8]]", (2, 4, 8, 8), (2, 0, 4, 8, 8)),
        ("intermediate_states: got strides [0, 256, 64, 8, 1], needs contiguous",
         {"intermediate_states": lambda x: x[:1].expand(2, 1, 4, 8, 8)}),
        ("intermediate_state_indices: got shape [1], needs [2]",
         {"intermediate_state_indices": make.indices([0])}),
        ("intermediate_state_indices: got a tensor, needs intermediate_states",
         {"intermediate_state_indices": make.indices([0, 1]), "intermediate_states": None}),
        ("intermediate_states: got a tensor, needs None", {"state_indices": lambda x: x[:, None]}),
        *values("softplus_beta", "a number above 0", 0.0),
        *values("softplus_threshold", "0 or more", -1.0),
        *values("scale", "a finite number", "1", math.nan),
    ),
    *wrong("gated_delta_rule_update", TypeError,
        ("qkv: got tuple, needs a tensor, or q, k and v", {"qkv": lambda x: (x, x)}),
        ("A_log: got NoneType, needs a tensor", {"A_log": None}),
        ("dt_bias: got NoneType, needs a tensor", {"dt_bias": None}),
        ("qkv: got str, needs a tensor, or q, k and v", {"qkv": "qkv"}),
        ("k: got float16, needs q's float32",
         {"qkv": _split(shaped(2, 2, 8), shaped(2, 2, 8, dtype=torch.float16), shaped(2, 4, 8))}),
        ("state: got float16, needs float32 or bfloat16", {"state": torch.Tensor.half}),
        ("state: got float64, needs float32 or bfloat16", {"state": cast(torch.float64)}),
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": [0, 1, 2]}),
        ("num_accepted_tokens: got list, needs a tensor", {"num_accepted_tokens": [0, 0]}),
        ("intermediate_states: got bfloat16, needs state's float32",
         {"intermediate_states": torch.Tensor.bfloat16}),
        ("intermediate_state_indices: got list, needs a", {"intermediate_state_indices": [0, 1]}),
    ),
    *wrong("gated_delta_rule_update", ValueError,
        ("state_indices: got 1 twice, needs each at most", {"state_indices": replaced(0, to=1)}),
        ("state_indices: got [5, 1], needs -1 to 4", {"state_indices": replaced(0, to=5)}),
        ("state_indices: got [-2, 1], needs -1 to 4", {"state_indices": replaced(0, to=-2)}),
        ("cu_seqlens: got 1 first and 2 last, needs 0", {"cu_seqlens": make.indices([1, 1, 2])}),
        ("cu_seqlens: got a negative length, needs", {"cu_seqlens": make.indices([0, 2, 1])}),
        ("cu_seqlens: got 0 first and 3 last, needs 0", {"cu_seqlens": make.indices([0, 1, 3])}),
        ("intermediate_states: got room for 1 tokens, needs 2",
         {"cu_seqlens": make.indices([0, 2, 2])}),
        ("num_accepted_tokens: got [0, 2], needs", {"num_accepted_tokens": make.indices([0, 2])}),
        ("num_accepted_tokens: got [-1, 0], needs", {"num_accepted_tokens": make.indices([-1, 0])}),
        ("intermediate_state_indices: got 0 twice, needs each at most once",
         {"intermediate_state_indices": make.indices([0, 0])}),
        ("intermediate_state_indices: got [0, 2], needs -1 to 1",
         {"intermediate_state_indices": make.indices([0, 2])}),
        ("intermediate_state_indices: got [-2, 0], needs -1 to 1",
         {"intermediate_state_indices": make.indices([-2, 0])}),
        ("intermediate_state_indices: got -1, needs a row for accepted tokens",
         {"intermediate_state_indices": make.indices([0, -1]),
          "num_accepted_tokens": make.indices([0, 1])}),
        reads=True),
    *wrong("gated_delta_rule_update", ValueError,
        ("state_indices: got room for 1 tokens, needs 2",
         {"state_indices": make.indices([[3], [1]])}),
        ("state_indices: got 3 twice, needs", {"state_indices": make.indices([[3, 3], [1, 3]])}),
        ("state_indices: got [[3, 5], [1, 2]], needs -1 to 4",
         {"state_indices": make.indices([[3, 5], [1, 2]])}),
        ("num_accepted_tokens: got [0, 1], needs", {"num_accepted_tokens": make.indices([0, 1])}),
        ("num_accepted_tokens: got [3, 1], needs", {"num_accepted_tokens": make.indices([3, 1])}),
        given=_BY_TOKEN, reads=True),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("gated_delta_rule_update", {"scale": 0.5}, {"use_qk_l2norm_in_kernel": False},
             {"state_v_first": False}, {"disable_state_update": True}, {"softplus_beta": 2.0},
             {"A_log": None, "dt_bias": None},
             {"A_log": None, "dt_bias": None, "state_v_first": False},
             {"softplus_threshold": 0.5}, {"state_indices": make.indices([-1, 1])},
             {"state_indices": make.indices([-1, -1])},
             {"num_accepted_tokens": make.indices([1, 0])}, {"intermediate_states": None},
             {"intermediate_state_indices": make.indices([-1, 1])}),
    *options("gated_delta_rule_update", {"scale": 8**-0.5}, {"cu_seqlens": make.indices([0, 1, 2])},
             {"intermediate_state_indices": make.indices([0, 1])}, same=True),
    *options("gated_delta_rule_update", {"num_accepted_tokens": make.indices([1, 2])},
             {"cu_seqlens": make.indices([0, 1, 3])}, {"num_accepted_tokens": None},
             given=_BY_TOKEN),
]  # fmt: skip
# Calls that the AscendC kernel does not support.
DECLINED = declined("gated_delta_rule_update", "ascendc",
    ("the call passes computed gates, the kernel takes A_log and dt_bias",
     {"A_log": None, "dt_bias": None}),
    ("softplus has beta 2.0", {"softplus_beta": 2.0}),
    ("softplus has beta 1.0, threshold 0.5", {"softplus_threshold": 0.5}),
)  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of one token of one sequence in a server's pool."""
    return [Case("decode", 1, 1, *model.linear, *[LINEAR_DIM] * 2)] if model.linear else []
