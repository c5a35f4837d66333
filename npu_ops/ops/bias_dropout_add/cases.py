"""Named shapes and tolerances of bias-dropout-add, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, options, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = tolerances((2e-15, 1e-14), (1e-7, 3e-7), (3e-4, 6e-4), (2.5e-3, 5e-3))
# The gradient of a [h] bias is a sum over rows in fp32, then rounded to the dtype. With few
# elements, the worst rounding dominates the error ratio.
SUM_TOLERANCES = tolerances((2e-15, 1e-14), (5e-7, 1e-6), (5e-4, 6e-4), (4e-3, 5e-3))

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
        """Return arguments of `bias_dropout_add` in training: normal numbers, the same on every
        device."""
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
    Case("odd-t1031-h4099", 1031, 4099),  # outputs exceed the cache, rows are not aligned
    Case("lanes-not-whole-chunks", 24, 300),  # the AscendC kernel cuts 48 columns into 32 and 16
    Case("batch-3", 65, 192, batch=3),
    Case("batch-3-full-bias", 63, 96, batch=3, bias="full"),
    Case("p-0", 65, 128, p=0.0),
    Case("p-0.5", 65, 128, p=0.5),
    Case("p-0.99", 65, 128, p=0.99),
]

# The arguments that have a gradient.
DIFFERENTIABLE = ("x", "bias", "residual")
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.
WRONG = [
    *wrong("bias_dropout_add", TypeError,
        ("dtype: got int64, needs float32, bfloat16, float16 or float64", {"dtype": torch.int64}),
        ("dtype: got bool, needs float32, bfloat16, float16 or float64", {"dtype": torch.bool}),
        *values("dtype", "float32, bfloat16, float16 or float64", "float32"),
        ("dtype: got float8_e5m2, needs float32, bfloat16, float16", {"dtype": torch.float8_e5m2}),
        ("generator: got int, needs a torch.Generator", {"generator": 42}),
    ),
    *wrong("bias_dropout_add", ValueError,
        ("x: got shape [], needs at least",
         {"x": shaped(), "residual": shaped(), "bias": None}),
        ("generator: got device cpu, needs x's meta",
         dict.fromkeys(("x", "bias", "residual"), lambda x: x.to("meta"))
         | {"generator": torch.Generator(device="cpu")}),
        *shapes("residual", "x's shape [6, 8]",
            (5, 8), (6, 7), (8, 6), (8,), (1, 8), (1, 6, 8), (0, 8),
        ),
        *shapes("bias", "[8] or x's shape [6, 8]", (9,), (1,), (1, 8), (6, 1), (6,), (1, 6, 8)),
        *values("p", "0 <= p < 1", -0.1, 1.0, 1, 10, math.nan, math.inf, "0.1", None),
        ("p: got a tensor, needs 0 <= p < 1", {"p": shaped()}),
        *values("p", "0 <= p < 1", 0.1 + 0j),
        ("p: got 2.0, needs 0 <= p < 1", {"p": 2.0, "training": False}),
    ),
    *wrong("bias_dropout_add", ValueError,
        ("inplace: got True, needs x of the result's dtype", {"residual": torch.Tensor.bfloat16}),
        ("inplace: got True, needs x of the result's dtype float16", {"dtype": torch.float16}),
        ("inplace: got True, needs a contiguous x",
         {"x": lambda x: x.reshape(8, 6).T.contiguous().reshape(8, 6).T}),
        ("inplace: got True, needs a contiguous x", {"x": lambda x: x.repeat(1, 2)[:, ::2]}),
        ("inplace: got True, needs a contiguous x", {"x": lambda x: x[:1].expand(6, 8)}),
        ("inplace: got True, needs False because x", {"x": lambda x: x.requires_grad_()[:]}),
        ("inplace: got True, needs False because x requires", {"x": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because bias", {"bias": torch.Tensor.requires_grad_}),
        ("inplace: got True, needs False because", {"residual": torch.Tensor.requires_grad_}),
        in_place=True),
]  # fmt: skip
# Changes that every implementation must honour.
OPTIONS = [
    *options("bias_dropout_add", {"p": 0.25}, {"p": 0}, {"training": False}, {"bias": None}),
    *options("bias_dropout_add", {"dtype": torch.bfloat16}, {"bias": shaped(6, 8)}),
    *options("bias_dropout_add", {"dtype": torch.float32}, {"inplace": False}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case after attention and the MLP; Qwen models have no bias."""
    return [Case("hidden", tokens, model.hidden, bias="none")]
