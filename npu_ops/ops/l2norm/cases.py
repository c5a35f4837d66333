"""Named shapes and tolerances of l2norm, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core.cases import Call, RowCase, options, shaped, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import LINEAR_DIM, Model

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype. The
# fp32 tolerance also covers the sum over a row, and the gradient, which is a difference.
TOLERANCES = tolerances((2e-15, 1e-14), (6e-7, 1e-6), (4e-4, 6e-4), (2.5e-3, 5e-3))


@dataclasses.dataclass(frozen=True)
class Case(RowCase):
    eps: float = 1e-6

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        return super().inputs(dtype, device, seed) | {"eps": self.eps}


CASES = [
    # Qwen3-Next and Qwen3.5 have 16 key heads of 128, and 32 value heads of 128 after q and k.
    *(
        Case(f"qwen3-next-tp{tp}-t{tokens}", tokens, 16 // tp, 128, 6144 // tp, large=tokens > 64)
        for tp in (1, 4)
        for tokens in (1, 64, 512, 8192, 20480)
    ),
    Case("qwen3-next-dense-t64", 64, 16, 128),
    Case("qwen3-next-dense-t8192", 8192, 16, 128, large=True),
    *(
        Case(f"odd-t{tokens}-d{dim}-behind{behind}", tokens, 3, dim, behind)
        for tokens, dim in ((0, 60), (1, 7), (63, 60), (65, 129), (131, 256))
        for behind in (0, 5)
    ),
    Case("one-element", 65, 3, 1, eps=0.5),  # a small eps would leave only rounding in the gradient
    Case("one-head", 131, 1, 96, 32),
    Case("wide-2048", 9, 2, 2048, 64),
    Case("wide-4096", 5, 1, 4096),
    Case("wide-20000", 2, 3, 20000, 64),  # wider than a tile
]

# The arguments that have a gradient.
DIFFERENTIABLE = ("x",)
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = ("qwen3-next-tp1-t64", "qwen3-next-dense-t64", "one-element", "wide-20000")

CALLS = [Call("l2norm", lambda draw: {"x": draw(3, 8)})]

# Invalid calls, and the error of each.
WRONG = [
    *wrong("l2norm", TypeError,
        ("output_dtype: got int32, needs float32, bfloat16", {"output_dtype": torch.int32}),
        ("output_dtype: got float8_e5m2, needs float32", {"output_dtype": torch.float8_e5m2}),
        *values("output_dtype", "float32, bfloat16, float16 or float64", "float32"),
    ),
    *wrong("l2norm", ValueError,
        *values("dim", "one of -1, 1", 0, 2, -2, None, (-1,)),
        *values("eps", "a finite number, 0 or more", -1e-6, math.nan, math.inf, "1e-6", None),
        ("eps: got a tensor, needs a finite number, 0 or more", {"eps": shaped()}),
    ),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("l2norm", {"eps": 0.5}, {"output_dtype": torch.bfloat16},
             {"output_dtype": torch.float16}),
    *options("l2norm", {"eps": 1e-6}, {"dim": 1}, {"output_dtype": torch.float32}, same=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of Gated Delta Net's queries, before keys and values in one projection."""
    if model.linear is None:
        return []
    heads = model.linear[0]
    return [Case("linear", tokens, heads, LINEAR_DIM, model.linear_channels - heads * LINEAR_DIM)]
