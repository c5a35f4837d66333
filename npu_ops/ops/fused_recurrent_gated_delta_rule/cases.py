"""Named shapes and tolerances of the recurrent gated delta rule, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, cast, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import LINEAR_DIM, Model

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding. fp32 has a wide
# tolerance because the gradient of a gate is a sum over a whole state, in which terms cancel.
TOLERANCES = tolerances((1e-13, 1e-12), (1e-5, 1e-5), (4e-4, 1e-3), (3e-3, 8e-3))

# key heads, value heads, K and V of one rank
MODELS = {
    "qwen3.5-9b-tp1": (16, 32, 128, 128),
    "qwen3-next-80b-tp4": (4, 8, 128, 128),
    "qwen3.5-0.8b-tp1": (16, 16, 128, 128),
}


def starts(tokens: int, sequences: int, device) -> torch.Tensor | None:
    """Return the starts of sequences and the end, every third one empty; None without sequences."""
    if not sequences:
        return None
    lengths = torch.zeros(sequences, dtype=torch.int64, device="cpu")
    kept = [n for n in range(sequences) if n % 3 != 1]
    for token in range(tokens):
        lengths[kept[token * token % len(kept)]] += 1
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


@dataclasses.dataclass(frozen=True)
class RuleCase:
    """A case of a gated delta rule.

    q, k `[batch, tokens, heads, keys]`, v `[batch, tokens, value_heads, values]`.
    flags: the function computes l2norm, gate and sigmoid.
    state: "none", or which dimension of the states is first: "k" or "v".
    sequences: 0, or the number of packed sequences, of which every third is empty.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    heads: int
    value_heads: int
    keys: int
    values: int
    batch: int = 1
    flags: bool = False
    state: str = "k"
    sequences: int = 0
    large: bool = False

    def state_and_flags(self, normal: Callable, device) -> dict:
        """Return the arguments after q, k, v, gates and beta. normal: draws a tensor of a shape."""
        states = self.sequences or self.batch
        matrix = (self.values, self.keys) if self.state == "v" else (self.keys, self.values)
        return {
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
            "cu_seqlens": starts(self.tokens, self.sequences, device),
        }


@dataclasses.dataclass(frozen=True)
class Case(RuleCase):
    """A case of the recurrent rule.

    gates: which of g, gk and gv are passed.
    beta: "head" (`[B, T, HV]`), "value" (`[B, T, HV, V]`) or "none".
    """

    gates: tuple[str, ...] = ("g",)
    beta: str = "head"

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of the function; keys are positively correlated, gates and beta fp32."""
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
        return {
            "q": key(self.heads),
            "k": key(self.heads),
            "v": normal(*tokens, self.value_heads, self.values).to(dtype),
            "g": gate("g"),
            "gk": gate("gk", self.keys),
            "gv": gate("gv", self.values),
            "beta": None if self.beta == "none" else beta if self.flags else beta.sigmoid(),
            **self.state_and_flags(normal, device),
        }


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

# The arguments that have a gradient.
DIFFERENTIABLE = (
    "q", "k", "v", "g", "gk", "gv", "beta", "initial_state", "A_log", "dt_bias",
)  # fmt: skip
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.
_PACKED = {name: lambda x: x[:1] for name in ("q", "k", "v", "g", "beta")}
_PACKED |= {"cu_seqlens": make.indices([0, 2, 5])}
# Changes that make a call of any delta rule invalid; also used by chunk_gated_delta_rule and
# chunk_kda.
WRONG_DTYPES = [
    ("k: got float32, needs q's float16", {"q": torch.Tensor.half}),
    ("v: got float16, needs q's float32", {"v": torch.Tensor.half}),
    ("initial_state: got bfloat16, needs float32", {"initial_state": torch.Tensor.bfloat16}),
    ("initial_state: got float64, needs float32", {"initial_state": cast(torch.float64)}),
    ("A_log: got list, needs a tensor", {"use_gate_in_kernel": True, "A_log": [0.0]}),
]  # fmt: skip
WRONG_SHAPES = [
    ("q: got shape [", {"q": lambda x: x[0]}),
    ("k: got shape [", {"k": lambda x: x[:, :3]}),
    ("k: got shape [", {"k": lambda x: x[..., :4]}),
    ("v: got shape [", {"v": lambda x: x[:, :3]}),
    ("v: got shape [", {"v": lambda x: x[..., :0]}),
    ("v: got shape [", {"v": lambda x: x[:, :, :3]}),
    ("q: got shape [", {"q": lambda x: x[:, :, :0], "k": lambda x: x[:, :, :0]}),
    ("g: got shape [", {"g": lambda x: x[..., None]}),
    ("beta: got shape [", {"beta": lambda x: x[:, :, :1]}),
    ("initial_state: got shape [", {"initial_state": lambda x: x[..., :4]}),
    ("initial_state: got shape [", {"initial_state": lambda x: x[..., :4], "state_v_first": True}),
    ("initial_state: got shape [", {"initial_state": lambda x: x.repeat(2, 1, 1, 1)}),
    ("initial_state: got shape [", {"initial_state": lambda x: x[:1]}),
    *values("allow_neg_eigval", "use_beta_sigmoid_in_kernel=True", True),
    ("A_log: got None, needs a tensor for", {"use_gate_in_kernel": True}),
    ("A_log: got a tensor, needs use_gate_in_kernel=True", {"A_log": shaped(4)}),
    ("dt_bias: got a tensor, needs use_gate_in_kernel=True", {"dt_bias": shaped(4)}),
    *values("scale", "a finite number", "1"),
]  # fmt: skip
# Arguments for raw gates, and changes that make such a call invalid.
GATED = {"use_gate_in_kernel": True, "A_log": shaped(4), "dt_bias": shaped(4)}
WRONG_GATES = [*shapes("A_log", "[4]", (1,)), *shapes("dt_bias", "[4]", (1,))]
WRONG = [
    *wrong("fused_recurrent_gated_delta_rule", TypeError,
        *WRONG_DTYPES,
        ("gk: got list, needs a tensor", {"gk": [0.0]}),
        ("gv: got list, needs a tensor", {"gv": [0.0]}),
    ),
    *wrong("fused_recurrent_gated_delta_rule", ValueError,
        *WRONG_SHAPES,
        ("v: got shape [2, 5, 4, 264], needs [B, T", {"v": lambda x: x.repeat(1, 1, 1, 33)}),
        *shapes("gk", "[2, 5, 4, 8]", (2, 5, 4, 6), (2, 5, 4)),
        *shapes("gv", "[2, 5, 4, 8]", (2, 5, 4, 6)),
        *shapes("beta", "[2, 5, 4] or [2, 5, 4, 8]", (2, 5, 4, 6)),
        ("g: got None, needs a", {"use_gate_in_kernel": True, "A_log": shaped(4), "g": None}),
        ("beta: got None, needs logits for", {"use_beta_sigmoid_in_kernel": True, "beta": None}),
        ("cu_seqlens: got a value with batch 2, needs batch 1",
         {"cu_seqlens": make.indices([0, 5])}),
    ),
    *wrong("fused_recurrent_gated_delta_rule", TypeError,
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": [0, 5]}),
        given=_PACKED),
    *wrong("fused_recurrent_gated_delta_rule", ValueError,
        *shapes("cu_seqlens", "[sequences + 1]", (1,), (1, 2)),
        ("initial_state: got shape [2, 4, 8, 8], needs [1", {"cu_seqlens": make.indices([0, 5])}),
        given=_PACKED),
    *wrong("fused_recurrent_gated_delta_rule", ValueError,
        ("cu_seqlens: got 0 first and 6 last, needs 0 and up", {"cu_seqlens": replaced(2, to=6)}),
        ("cu_seqlens: got 1 first and 5 last, needs 0 and up", {"cu_seqlens": replaced(0, to=1)}),
        ("cu_seqlens: got a negative length, needs starts", {"cu_seqlens": replaced(1, to=6)}),
        given=_PACKED, reads=True),
    *wrong("fused_recurrent_gated_delta_rule", ValueError, *WRONG_GATES, given=GATED),
]  # fmt: skip

# Valid argument changes that the tests of all delta rules use. In chunk_kda, dt_bias has another
# shape, so its tests replace GATED.
CHANGES = (
    {"scale": 0.5}, {"initial_state": None}, {"output_final_state": False},
    {"use_qk_l2norm_in_kernel": False}, {"state_v_first": True},
    {"use_beta_sigmoid_in_kernel": True},
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_gate_in_kernel": True, "A_log": shaped(4)},
    GATED,
)  # fmt: skip

# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("fused_recurrent_gated_delta_rule", *CHANGES, {"beta": None}, {"g": None},
             {"gk": shaped(2, 5, 4, 8)}, {"gv": shaped(2, 5, 4, 8)},
             {"beta": shaped(2, 5, 4, 8)}),
    *options("fused_recurrent_gated_delta_rule", {"scale": 8**-0.5}, same=True),
    *options("fused_recurrent_gated_delta_rule", {"cu_seqlens": make.indices([0, 4, 5])},
             given=_PACKED),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of one token of one sequence."""
    if model.linear is None:
        return []
    return [Case("decode", 1, *model.linear, LINEAR_DIM, LINEAR_DIM, state="v")]
