"""Named shapes and tolerances of linear. npu_ops/core/cases.py explains the names."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, cast, shapes, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Measured against fp64 on the same inputs: sums of thousands of products in fp32, and one rounding.
TOLERANCES = tolerances((1e-13, 1e-12), (2e-6, 4e-5), (5e-4, 1e-2), (4e-3, 8e-2))


@dataclasses.dataclass(frozen=True)
class Case:
    """x `[tokens, depth]`: the first columns of a tensor that has `behind` more columns."""

    name: str
    tokens: int
    depth: int
    columns: int
    bias: bool = False
    behind: int = 0
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the function's arguments: normal, with weights such that results are normal."""
        draw = torch.Generator(device="cpu").manual_seed(seed)
        x = make.normal((self.tokens, self.depth + self.behind), draw)
        weight = make.normal((self.columns, self.depth), draw) / max(self.depth, 1) ** 0.5
        bias = make.normal((self.columns,), draw) if self.bias else None
        given = {"x": x, "weight": weight, "bias": bias}
        given = {n: None if t is None else t.to(device, dtype) for n, t in given.items()}
        return given | {"x": given["x"][:, : self.depth]}


CASES = [
    Case("two-steps-t33", 33, 200, 130),
    *(Case(f"qwen3-8b-o-t{n}", n, 4096, 4096, large=True) for n in (1, 64, 4096)),
    Case("qwen3-vl-vision-qkv-t200", 200, 1152, 3456, bias=True, large=True),
    *(Case(f"odd-t{n}", n, 3 * n + 7, 2 * n + 3, bias=True, behind=n % 3)
      for n in (0, 1, 2, 65, 129)),
]  # fmt: skip
DIFFERENTIABLE = ("x", "weight", "bias")
# Together, these cases take every branch of the Triton kernel.
REPRESENTATIVE = ("two-steps-t33", "odd-t2")
CALLS = [
    Call("linear", lambda draw: {"x": draw(3, 8), "weight": draw(5, 8), "bias": draw(5)}),
]  # fmt: skip
# Invalid calls, and the error of each.
WRONG = [
    *wrong("linear", ValueError,
        *shapes("weight", "[N, 8], x's last dimension", (8,), (5, 7), (1, 5, 8)),
        *shapes("bias", "[5], weight's rows", (1,), (8,), (5, 1))),
    *wrong("linear", TypeError,
        ("weight: got float16, needs x's float32", {"weight": cast(torch.float16)}),
        ("bias: got bfloat16, needs x's float32", {"bias": cast(torch.bfloat16)})),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of the output projection of attention."""
    return [Case("o", tokens, model.heads * model.head_dim, model.hidden)]
