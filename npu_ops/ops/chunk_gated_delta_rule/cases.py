"""Named shapes and tolerances of the chunked gated delta rule, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import LINEAR_DIM, Model
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases as delta
from npu_ops.ops.fused_recurrent_gated_delta_rule.cases import MODELS

# Measured against fp64 on the same inputs. fp32 inputs are computed in fp32. With bf16 and fp16
# inputs, operands of matrix products are rounded to that dtype, as in every implementation.
TOLERANCES = tolerances((1e-12, 1e-11), (1e-5, 1e-5), (2e-3, 4e-3), (1e-2, 3e-2))
# An output's tolerance follows the dtype of the inputs, even for fp32 states of bf16 inputs.
TOLERANCES_BY_INPUT = True


@dataclasses.dataclass(frozen=True)
class Case(delta.RuleCase):
    """A case of the chunked rule.

    norms: the function computes l2norm. flags: the function computes l2norm, gate and sigmoid.
    """

    chunk: int = 64
    norms: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of the function; keys are positively correlated, gates and beta fp32."""
        draw = torch.Generator().manual_seed(seed)
        tokens = (self.batch, self.tokens)
        normalize = self.norms or self.flags

        def normal(*shape):
            return make.normal(shape, draw).to(device)

        def key():
            x = make.uniform((*tokens, self.heads, self.keys), draw).to(device)
            return (x if normalize else torch.nn.functional.normalize(x, dim=-1)).to(dtype)

        g, beta = (normal(*tokens, self.value_heads) for _ in range(2))
        return {
            "q": key(),
            "k": key(),
            "v": normal(*tokens, self.value_heads, self.values).to(dtype),
            "g": g if self.flags else -g.abs() / 4,
            "beta": beta if self.flags else beta.sigmoid(),
            **self.state_and_flags(normal, device),
            "use_qk_l2norm_in_kernel": normalize,
            "chunk_size": self.chunk,
        }


def model_case(model: str, tokens: int, **changes) -> Case:
    return Case(f"{model}-t{tokens}", tokens, *MODELS[model], **changes)


# Few cases: each K, V, chunk and dtype compiles one more set of kernels.
CASES = [
    *(model_case(model, tokens, large=tokens > 1) for model in MODELS for tokens in (1, 4096)),
    Case("dense", 40, 1, 2, 16, 24, chunk=16, batch=2),
    Case("packed", 75, 1, 2, 16, 24, chunk=16, sequences=5, flags=True, state="v"),
    Case("no-state", 33, 2, 2, 16, 24, chunk=16, state="none"),
    Case("chunk-32", 70, 1, 3, 20, 12, chunk=32, state="v"),
    Case("chunk-1", 35, 1, 3, 20, 12, chunk=1, state="v", norms=True),
    Case("chunk-1-packed", 40, 2, 2, 16, 24, chunk=1, sequences=5),
    Case("chunk-64", 130, 1, 2, 64, 32),
    Case("wide", 65, 1, 1, 256, 256, state="v", norms=True),
    Case("norms", 65, 1, 2, 128, 128, norms=True),
    Case("one", 3, 1, 1, 1, 1, chunk=16),
    Case("empty", 0, 1, 2, 16, 24, chunk=16),
]

# The arguments that have a gradient.
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = ("qwen3.5-9b-tp1-t1", "packed", "no-state", "chunk-32", "wide")

CALLS = [
    Call(
        "chunk_gated_delta_rule",
        lambda draw: {
            "q": draw(1, 20, 2, 16), "k": draw(1, 20, 2, 16), "v": draw(1, 20, 4, 16),
            "g": -draw(1, 20, 4).abs(), "beta": draw(1, 20, 4).sigmoid(),
            "initial_state": draw(2, 4, 16, 16), "output_final_state": True,
            "use_qk_l2norm_in_kernel": True, "chunk_size": 16,
            "cu_seqlens": make.indices([0, 3, 20]),
        },
    ),
]  # fmt: skip

# Arguments for new sequences whose final states carry their unfinished chunk.
CARRIED = {"carry_unfinished": True, "state_v_first": True, "chunk_size": 64,
           "initial_state": None}  # fmt: skip

# Invalid calls, and the error of each.
WRONG_STARTS = [
    ("cu_seqlens: got 0 first and 21 last, needs 0 and", {"cu_seqlens": replaced(2, to=21)}),
    ("cu_seqlens: got 1 first and 20 last, needs 0 and", {"cu_seqlens": replaced(0, to=1)}),
    ("cu_seqlens: got a negative length, needs starts", {"cu_seqlens": replaced(1, to=21)}),
]
WRONG = [
    *wrong("chunk_gated_delta_rule", TypeError,
        *delta.WRONG_DTYPES,
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": [0, 20]}),
        ("cu_seqlens_cpu: got list, needs a tensor", {"cu_seqlens_cpu": [0, 20]}),
        ("chunk_indices: got list, needs a tensor", {"chunk_indices": [[0, 0]]}),
        ("g: got NoneType, needs a tensor", {"g": None}),
    ),
    *wrong("chunk_gated_delta_rule", ValueError,
        *delta.WRONG_SHAPES,
        *shapes("cu_seqlens", "[sequences + 1]", (1,), (1, 3)),
        ("cu_seqlens: got a value with batch 2, needs batch 1",
         {"q": shaped(2, 20, 2, 16), "k": shaped(2, 20, 2, 16), "v": shaped(2, 20, 4, 16),
          "g": shaped(2, 20, 4), "beta": shaped(2, 20, 4)}),
        ("cu_seqlens_cpu: got a value without cu_seqlens, needs both",
         {"cu_seqlens": None, "initial_state": None, "cu_seqlens_cpu": make.indices([0, 20])}),
        ("chunk_indices: got a value without cu_seqlens, needs both",
         {"cu_seqlens": None, "initial_state": None, "chunk_indices": make.indices([[0, 0]])}),
        *values("chunk_size", "one of 1, 16, 32, 64", 128, 0, "16"),
        ("state_v_first: got False with carry_unfinished, needs", {"carry_unfinished": True}),
        ("chunk_size: got 16 with carry_unfinished, needs 64",
         {"carry_unfinished": True, "state_v_first": True}),
        ("return_intermediate_states: got a value with carry_unfinished, needs None",
         CARRIED | {"return_intermediate_states": True}),
        ("initial_state: got shape [2, 4, 16, 16], needs [2, 4, 153, 16]",
         CARRIED | {"initial_state": shaped(2, 4, 16, 16)}),
        ("v: got shape [1, 20, 4, 272], needs [B, T", {"v": lambda x: x.repeat(1, 1, 1, 17)}),
    ),
    *(one for given in ({}, CARRIED)
      for one in wrong("chunk_gated_delta_rule", ValueError, *WRONG_STARTS, given=given,
                       reads=True)),
    *wrong("chunk_gated_delta_rule", ValueError, *delta.WRONG_GATES, given=delta.GATED),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("chunk_gated_delta_rule", *delta.CHANGES,
             {"cu_seqlens": make.indices([0, 9, 20])}),
    *options("chunk_gated_delta_rule", {"return_intermediate_states": True}, CARRIED,
             trains=False),
    *options("chunk_gated_delta_rule", {"chunk_size": 32}, {"chunk_size": 1}, {"scale": 0.25},
             {"cu_seqlens_cpu": make.indices([0, 3, 20])},
             {"chunk_indices": make.indices([[0, 0], [1, 0], [1, 1]])},
             same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the cases of Gated Delta Net's layers, in training and for a prompt."""
    return [Case("linear", tokens, *model.linear, *[LINEAR_DIM] * 2)] if model.linear else []
