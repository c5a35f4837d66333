"""Named shapes and tolerances of the recurrent gated delta rule."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.compare import Tolerance
from npu_ops.core.models import LINEAR_DIM, Model

# Against fp64 on the same inputs: fp32 arithmetic, then one rounding. The gradient
# of a gate is a sum over a whole state, in which much cancels.
TOLERANCES = {
    torch.float64: Tolerance(ratio=1e-13, max_abs=1e-12),
    torch.float32: Tolerance(ratio=1e-5, max_abs=1e-5),
    torch.float16: Tolerance(ratio=4e-4, max_abs=1e-3),
    torch.bfloat16: Tolerance(ratio=3e-3, max_abs=8e-3),
}

# key heads, value heads, K, V of one rank
MODELS = {
    "qwen3.5-9b-tp1": (16, 32, 128, 128),
    "qwen3-next-80b-tp4": (4, 8, 128, 128),
    "qwen3.5-0.8b-tp1": (16, 16, 128, 128),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """q, k `[batch, tokens, heads, keys]`, v `[batch, tokens, value_heads, values]`.

    gates: which of g, gk and gv there are. beta: its last dimension, "head" or "value", or "none".
    flags: l2norm, gate and sigmoid are left to the operator.
    state: "none", or which dimension of the states is first: "k" or "v".
    sequences: 0, or how many the tokens are cut into; every third is empty.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    heads: int
    value_heads: int
    keys: int
    values: int
    batch: int = 1
    gates: tuple[str, ...] = ("g",)
    beta: str = "head"
    flags: bool = False
    state: str = "k"
    sequences: int = 0
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of the function; keys are positively correlated, gates and beta fp32."""
        draw = torch.Generator().manual_seed(seed)
        tokens = (self.batch, self.tokens)

        def normal(*shape):
            return make.normal(shape, draw).to(device)

        def key(heads):
            x = make.uniform((*tokens, heads, self.keys), draw).to(device)
            return (x if self.flags else torch.nn.functional.normalize(x, dim=-1)).to(dtype)

        def gate(name, *width):
            wanted = name in self.gates
            raw = normal(*tokens, self.value_heads, *width)
            return (raw if self.flags and name == "g" else -raw.abs() / 4) if wanted else None

        width = (self.values,) if self.beta == "value" else ()
        beta = normal(*tokens, self.value_heads, *width)
        cu_seqlens = self._cu_seqlens(device)
        states = self.sequences or self.batch
        matrix = (self.values, self.keys) if self.state == "v" else (self.keys, self.values)
        return {
            "q": key(self.heads),
            "k": key(self.heads),
            "v": normal(*tokens, self.value_heads, self.values).to(dtype),
            "g": gate("g"),
            "gk": gate("gk", self.keys),
            "gv": gate("gv", self.values),
            "beta": None if self.beta == "none" else beta if self.flags else beta.sigmoid(),
            "initial_state": None
            if self.state == "none"
            else normal(states, self.value_heads, *matrix),
            "output_final_state": self.state != "none",
            "use_qk_l2norm_in_kernel": self.flags,
            "use_gate_in_kernel": self.flags,
            "A_log": normal(self.value_heads) if self.flags else None,
            "dt_bias": normal(self.value_heads) if self.flags else None,
            "use_beta_sigmoid_in_kernel": self.flags,
            "allow_neg_eigval": self.flags,
            "state_v_first": self.state == "v",
            "cu_seqlens": cu_seqlens,
        }

    def _cu_seqlens(self, device):
        if not self.sequences:
            return None
        lengths = torch.zeros(self.sequences, dtype=torch.int64, device="cpu")
        kept = [n for n in range(self.sequences) if n % 3 != 1]
        for token in range(self.tokens):
            lengths[kept[token * token % len(kept)]] += 1
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


def model_case(model: str, tokens: int, **changes) -> Case:
    return Case(f"{model}-t{tokens}", tokens, *MODELS[model], **changes)


CASES = [
    *(
        model_case(model, tokens, state="v", large=tokens > 1)
        for model in MODELS
        for tokens in (1, 256)
    ),
    Case("dense", 18, 1, 2, 16, 24, batch=2),
    Case("dense-v-first", 18, 1, 2, 16, 24, batch=2, state="v"),
    Case("packed", 25, 1, 3, 20, 12, sequences=5),
    Case("packed-v-first", 25, 1, 3, 20, 12, sequences=5, state="v", flags=True),
    Case("all-gates", 19, 1, 2, 12, 40, gates=("g", "gk", "gv"), beta="value"),
    Case("all-gates-v-first", 19, 1, 2, 12, 40, gates=("g", "gk", "gv"), beta="value", state="v"),
    Case("key-gate", 9, 2, 2, 8, 8, gates=("gk",), state="none"),
    Case("value-gate", 9, 2, 2, 8, 8, gates=("gv",)),
    Case("flags", 9, 2, 4, 16, 16, flags=True, batch=2),
    Case("no-gates", 20, 1, 1, 8, 70, gates=(), beta="none", state="none"),
    Case("wide", 5, 1, 1, 256, 256, state="v"),
    Case("one", 3, 1, 1, 1, 1),
    Case("one-key", 4, 1, 2, 1, 9, state="v"),
    Case("empty", 0, 1, 2, 8, 8),
    Case("empty-packed", 0, 1, 2, 8, 8, sequences=2),
    Case("long", 300, 1, 1, 16, 16, batch=1),
    Case("long-packed", 200, 2, 2, 16, 16, sequences=2),
]

# What the function is differentiable in.
DIFFERENTIABLE = (
    "q", "k", "v", "g", "gk", "gv", "beta", "initial_state", "A_log", "dt_bias",
)  # fmt: skip
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3.5-9b-tp1-t1", "packed", "all-gates", "all-gates-v-first", "wide",
)  # fmt: skip

CALLS = [
    Call(
        "fused_recurrent_gated_delta_rule",
        lambda draw: {
            "q": draw(2, 5, 2, 8), "k": draw(2, 5, 2, 8), "v": draw(2, 5, 4, 8),
            "g": -draw(2, 5, 4).abs(), "beta": draw(2, 5, 4).sigmoid(),
            "initial_state": draw(2, 4, 8, 8), "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        },
    ),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """A token of one sequence."""
    if model.linear is None:
        return []
    return [Case("decode", 1, *model.linear, LINEAR_DIM, LINEAR_DIM, state="v")]
