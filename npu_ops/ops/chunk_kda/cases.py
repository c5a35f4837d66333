"""Named shapes and tolerances of Kimi Delta Attention, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, shaped, shapes, values, wrong
from npu_ops.core.models import LINEAR_DIM, Model
from npu_ops.ops.chunk_gated_delta_rule import cases as chunk
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases as delta

# The tolerances of the chunked gated delta rule, although bf16 q and k are rounded once more here,
# after the product with a decay.
TOLERANCES = chunk.TOLERANCES
TOLERANCES_BY_INPUT = True

# key heads, value heads, K and V of one rank
MODELS = {"kimi-linear-48b-tp1": (32, 32, 128, 128), "kimi-linear-48b-tp4": (8, 8, 128, 128)}


@dataclasses.dataclass(frozen=True)
class Case(chunk.Case):
    """A case of the chunked gated delta rule, with a decay for each key."""

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of the function; keys are positively correlated, gates and beta fp32."""
        given = super().inputs(dtype, device, seed)
        draw = torch.Generator().manual_seed(seed + 1)
        g = make.normal((*given["v"].shape[:3], self.keys), draw).to(device)
        given["g"] = g if self.flags else -g.abs() / 4
        if self.flags:
            given["dt_bias"] = make.normal((self.value_heads * self.keys,), draw).to(device)
        return given


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
    Case("chunk-64", 130, 1, 2, 64, 32),
    Case("wide", 65, 1, 1, 256, 256, state="v", norms=True),
    Case("norms", 65, 1, 2, 128, 128, norms=True),
    Case("one", 3, 1, 1, 1, 1, chunk=16),
    Case("empty", 0, 1, 2, 16, 24, chunk=16),
]

# The arguments that have a gradient.
DIFFERENTIABLE = chunk.DIFFERENTIABLE
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = ("kimi-linear-48b-tp1-t1", "packed", "no-state", "chunk-32", "wide")

CALLS = [
    Call(
        "chunk_kda",
        lambda draw: {
            "q": draw(1, 20, 2, 16), "k": draw(1, 20, 2, 16), "v": draw(1, 20, 4, 16),
            "g": -draw(1, 20, 4, 16).abs(), "beta": draw(1, 20, 4).sigmoid(),
            "initial_state": draw(2, 4, 16, 16), "output_final_state": True,
            "use_qk_l2norm_in_kernel": True, "chunk_size": 16,
            "cu_seqlens": make.indices([0, 3, 20]),
        },
    ),
]  # fmt: skip

# Arguments that select raw gates: without, and with a lower bound.
GATED = {"use_gate_in_kernel": True, "A_log": shaped(4), "dt_bias": shaped(64)}
BOUNDED = GATED | {"lower_bound": -5.0}

# Invalid calls, and the error of each.
WRONG = [
    *wrong("chunk_kda", TypeError,
        *delta.WRONG_DTYPES,
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": [0, 20]}),
        ("cu_seqlens_cpu: got list, needs a tensor", {"cu_seqlens_cpu": [0, 20]}),
        ("g: got NoneType, needs a tensor", {"g": None}),
    ),
    *wrong("chunk_kda", ValueError,
        *delta.WRONG_SHAPES,
        *shapes("g", "[1, 20, 4, 16]", (1, 20, 4), (1, 20, 2, 16)),
        ("cu_seqlens_cpu: got a value without cu_seqlens, needs both",
         {"cu_seqlens": None, "initial_state": None, "cu_seqlens_cpu": make.indices([0, 20])}),
        *values("chunk_size", "one of 1, 16, 32, 64", 128, 0, "16"),
        ("lower_bound: got -5.0, needs use_gate_in_kernel=True", {"lower_bound": -5.0}),
        ("v: got shape [1, 20, 4, 272], needs [B, T", {"v": lambda x: x.repeat(1, 1, 1, 17)}),
    ),
    *wrong("chunk_kda", ValueError, *chunk.WRONG_STARTS, reads=True),
    *wrong("chunk_kda", ValueError,
        *shapes("A_log", "[4]", (1,)), *shapes("dt_bias", "[64]", (4,), (4, 16)),
        ("lower_bound: got None with safe_gate=True, needs a number", {"safe_gate": True}),
        *values("lower_bound", "a finite number below 0", 0.0, 1, float("nan"), "1"),
        given=GATED),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("chunk_kda", *(change for change in delta.CHANGES if "dt_bias" not in change), GATED,
             BOUNDED, BOUNDED | {"A_log": None}, {"cu_seqlens": make.indices([0, 9, 20])}),
    *options("chunk_kda", {"chunk_size": 32}, {"chunk_size": 1}, {"scale": 0.25},
             {"safe_gate": True}, {"cu_seqlens_cpu": make.indices([0, 3, 20])}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of a KDA layer with the heads of the model's Gated Delta Net."""
    return [Case("linear", tokens, *model.linear, *[LINEAR_DIM] * 2)] if model.linear else []
