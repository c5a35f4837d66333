"""Named shapes and tolerances of swiglu. npu_ops/core/cases.py explains the names."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, RowCase, cast, shapes, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = tolerances((1e-14, 1e-13), (1e-6, 2e-6), (5e-4, 1e-3), (4e-3, 8e-3))


@dataclasses.dataclass(frozen=True)
class Case(RowCase):
    """in_one: gate and up are in one tensor, as one projection returns both."""

    names: tuple[str, ...] = ("gate", "up")
    in_one: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the function's arguments, normally distributed: slices of a matrix's columns.

        Each is `[tokens, heads * dim]`; with in_one, gate is `[tokens, 2 * heads * dim]`.
        """
        if not self.in_one:
            given = super().inputs(dtype, device, seed)
            return {name: tensor.flatten(1) for name, tensor in given.items()}
        draw = torch.Generator(device="cpu").manual_seed(seed)
        width = 2 * self.heads * self.dim
        both = make.normal((self.tokens, width + self.behind), draw).to(device, dtype)
        return {"gate": both[:, :width]}


CASES = [
    *(Case(f"qwen3-8b-t{n}", n, 1, 12288, large=n > 64) for n in (1, 64, 8192)),
    *(
        Case(f"qwen3-8b-in-one-t{n}", n, 1, 12288, large=n > 64, in_one=True)
        for n in (1, 64, 8192)
    ),
    Case("qwen3-30b-a3b-expert-t33", 33, 1, 768, in_one=True),
    *(Case(f"odd-t{n}", n, 3, 2 * n + 3, behind=n % 2) for n in (0, 1, 65, 131)),
    *(Case(f"odd-in-one-t{n}", n, 1, 2 * n + 3, behind=n % 2, in_one=True) for n in (0, 1, 65)),
]  # fmt: skip
DIFFERENTIABLE = ("gate", "up")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-8b-t64", "qwen3-8b-in-one-t64", "qwen3-30b-a3b-expert-t33", "odd-t65", "odd-in-one-t65",
)  # fmt: skip
CALLS = [
    Call("swiglu", lambda draw: {"gate": draw(3, 8), "up": draw(3, 8)}),
    Call("swiglu", lambda draw: {"gate": draw(3, 16)}, "swiglu in one"),
]
# Invalid calls, and the error of each.
WRONG = [
    *wrong("swiglu", ValueError,
        *shapes("up", "gate's shape [3, 8]", (8,), (1, 8), (3, 16), (4, 8))),
    *wrong("swiglu", TypeError,
        ("up: got float16, needs gate's float32", {"up": cast(torch.float16)})),
    *wrong("swiglu in one", ValueError,
        *shapes("gate", "an even last dimension, because up is None", (3, 15), (1,)),
        *shapes("gate", "at least one dimension", ())),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the cases of the model's MLP or expert: two projections in transformers, one in a
    server."""
    width = model.mlp or model.expert
    return [
        Case("apart", tokens, 1, width),
        Case("joined", tokens, 1, width, in_one=True),
    ]
