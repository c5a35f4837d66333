"""Named shapes and tolerances of bias-dropout-add, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.compare import Tolerance
from npu_ops.core.models import Model

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = {
    torch.float64: Tolerance(ratio=2e-15, max_abs=1e-14),
    torch.float32: Tolerance(ratio=1e-7, max_abs=3e-7),
    torch.float16: Tolerance(ratio=3e-4, max_abs=6e-4),
    torch.bfloat16: Tolerance(ratio=2.5e-3, max_abs=5e-3),
}
# The gradient of a [h] bias is a sum over rows in fp32, then rounded to the dtype. It may have few
# elements, so its ratio is that of the worst rounding and not of the average one.
SUM_TOLERANCES = {
    torch.float64: Tolerance(ratio=2e-15, max_abs=1e-14),
    torch.float32: Tolerance(ratio=5e-7, max_abs=1e-6),
    torch.float16: Tolerance(ratio=5e-4, max_abs=6e-4),
    torch.bfloat16: Tolerance(ratio=4e-3, max_abs=5e-3),
}

HIDDEN_SIZES = {
    "qwen3-4b": 2560,
    "qwen3-32b": 5120,
    "qwen3-30b-a3b": 2048,
    "qwen3-vl-8b": 4096,
    "qwen3.5-9b": 4096,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """x and residual are [tokens, batch, hidden], as in Megatron.

    bias: "none", "row" ([hidden]) or "full" (x's shape).
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    hidden: int
    batch: int = 1
    bias: str = "row"
    p: float = 0.1
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `bias_dropout_add` in training: normal, the same on every device."""
        draw = torch.Generator().manual_seed(seed)
        shape = (self.tokens, self.batch, self.hidden)
        bias_shape = {"none": None, "row": shape[-1:], "full": shape}[self.bias]

        def normal(shape):
            return make.normal(shape, draw).to(device, dtype)

        return {
            "x": normal(shape),
            "bias": None if bias_shape is None else normal(bias_shape),
            "residual": normal(shape),
            "p": self.p,
            "training": True,
        }


CASES = [
    *(
        Case(f"{model}-decode-{tokens}", tokens, hidden, bias="none", large=tokens > 64)
        for model, hidden in HIDDEN_SIZES.items()
        for tokens in (1, 64, 512)
    ),
    # Sequence parallel: a rank has 1/TP of the packed tokens.
    *(
        Case(f"{model}-train-{tokens}-tp{tp}", tokens // tp, hidden, bias="none", large=True)
        for model, hidden in HIDDEN_SIZES.items()
        for tokens in (8192, 20480)
        for tp in (1, 4)
    ),
    Case("megatron-train-8192", 8192, 4096, large=True),
    Case("qwen3-vl-8b-vision-16384", 16384, 1152, large=True),
    Case("qwen3-vl-8b-vision-256", 256, 1152),
    *(
        Case(f"odd-t{tokens}-h{hidden}-{bias}", tokens, hidden, bias=bias)
        for tokens, hidden in ((0, 80), (1, 1), (63, 129), (65, 7), (131, 1000))
        for bias in ("none", "row", "full")
    ),
    Case("odd-t1031-h4099", 1031, 4099),  # outputs too large for the cache, rows not aligned
    Case("lanes-not-whole-chunks", 24, 300),  # the AscendC kernel cuts 48 columns into 32 and 16
    Case("batch-3", 65, 192, batch=3),
    Case("batch-3-full-bias", 63, 96, batch=3, bias="full"),
    Case("p-0", 65, 128, p=0.0),
    Case("p-0.5", 65, 128, p=0.5),
    Case("p-0.99", 65, 128, p=0.99),
]

# What the function is differentiable in.
DIFFERENTIABLE = ("x", "bias", "residual")
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = ("megatron-train-8192", "qwen3-4b-decode-64", "batch-3-full-bias", "p-0")

CALLS = [
    Call(
        "bias_dropout_add",
        lambda draw: {
            "x": draw(6, 8), "bias": draw(8), "residual": draw(6, 8), "p": 0.5, "training": True,
        },
        writes=("x",),
        in_place={"inplace": True},
        fixed={"training": False},
    ),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """What follows attention and the MLP; Qwen's have no bias."""
    return [Case("hidden", tokens, model.hidden, bias="none")]
