"""Named shapes and tolerances of rms_norm and add_rms_norm, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, RowCase, cast, options, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype; the sum
# of add_rms_norm is rounded before. The gradient of weight has few elements, each a sum over rows,
# so the worst rounding alone determines its RMS error.
TOLERANCES = tolerances((1e-14, 1e-13), (2e-6, 2e-6), (1e-3, 1.2e-3), (8e-3, 1e-2))


@dataclasses.dataclass(frozen=True)
class Case(RowCase):
    """add: a case of `add_rms_norm`. weight_dtype: None for x's dtype."""

    add: bool = False
    zero_centered: bool = False
    weight_dtype: torch.dtype | None = None

    @property
    def function(self) -> str:
        return "add_rms_norm" if self.add else "rms_norm"

    @property
    def differentiable(self) -> tuple[str, ...]:
        return DIFFERENTIABLE if self.add else ("x", "weight")

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the function's arguments: normal, with weights around their initial value."""
        names = ("x", "residual") if self.add else ("x",)
        given = dataclasses.replace(self, names=names)
        draw = torch.Generator(device="cpu").manual_seed(seed + 1)
        weight = make.normal((self.dim,), draw) / 4 + (not self.zero_centered)
        return super(Case, given).inputs(dtype, device, seed) | {
            "weight": weight.to(device, self.weight_dtype or dtype),
            "zero_centered": self.zero_centered,
        }


CASES = [
    *(Case(f"qwen3-8b-t{n}", n, 1, 4096, large=n > 64) for n in (1, 64, 8192)),
    *(
        Case(f"qwen3-8b-add-t{n}", n, 1, 4096, large=n > 64, add=True)
        for n in (1, 64, 8192)
    ),
    Case("qwen3.5-9b-q-t33", 33, 16, 256, behind=64, zero_centered=True),  # norms of heads
    Case("qwen3-next-t5", 5, 1, 2048, zero_centered=True, weight_dtype=torch.float32),
    *(Case(f"odd-t{n}", n, 3, 2 * n + 3, behind=n % 2) for n in (0, 1, 65, 131)),
    *(
        Case(f"odd-add-t{n}", n, 3, 2 * n + 3, behind=n % 2, add=True, zero_centered=True)
        for n in (0, 1, 65)
    ),
    Case("wide-20000", 2, 1, 20000),  # wider than a tile
    Case("wide-add-20000", 3, 1, 20000, add=True, zero_centered=True),
]  # fmt: skip
DIFFERENTIABLE = ("x", "residual", "weight")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-8b-t64", "qwen3-8b-add-t64", "qwen3.5-9b-q-t33", "odd-t65", "odd-add-t65", "wide-20000",
    "wide-add-20000",
)  # fmt: skip
CALLS = [
    Call("rms_norm", lambda draw: {"x": draw(3, 8), "weight": draw(8)}),
    Call(
        "add_rms_norm",
        lambda draw: {"x": draw(3, 8), "residual": draw(3, 8), "weight": draw(8)},
    ),
]  # fmt: skip
_EITHER = (
    *shapes("weight", "[8], x's last dimension", (1,), (7,), (3, 8)),
    *values("eps", "a finite number, 0 or more", -1.0, math.nan, math.inf, None, "1e-6"),
)
# Invalid calls, and the error of each.
WRONG = [
    *wrong("rms_norm", ValueError, *_EITHER),
    *wrong("add_rms_norm", ValueError, *_EITHER,
        *shapes("residual", "x's shape [3, 8]", (8,), (1, 8), (4, 8))),
    *wrong("add_rms_norm", TypeError,
        ("residual: got float16, needs x's float32", {"residual": cast(torch.float16)})),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    option
    for name in ("rms_norm", "add_rms_norm")
    for option in (
        *options(name, {"eps": 0.5}, {"zero_centered": True}),
        *options(name, {"eps": 1e-6}, {"zero_centered": False}, same=True),
    )
]


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the norm before a layer, and the norm of q's heads."""
    zero_centered = model.linear is not None
    return [
        Case("hidden", tokens, 1, model.hidden, add=True, zero_centered=zero_centered),
        Case("heads", tokens, model.heads, model.head_dim, zero_centered=zero_centered),
    ]
