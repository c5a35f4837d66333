"""Named shapes and tolerances of rms_norm_gated, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, declined, options, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import LINEAR_DIM, Model

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype. The
# gradient of weight has few elements, each a sum over rows, so the worst rounding alone determines
# its RMS error.
TOLERANCES = tolerances((1e-14, 1e-13), (2e-6, 2e-6), (5e-4, 6e-4), (4e-3, 5e-3))


@dataclasses.dataclass(frozen=True)
class Case:
    """x is [tokens, heads, dim].

    behind: number of elements that follow each token's z in its projection.
    weight_dtype: None for the dtype of x and z.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    heads: int
    dim: int
    behind: int = 0
    norm_before_gate: bool = True
    activation: str = "silu"
    group_size: int | None = None
    weight_dtype: torch.dtype | None = None
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of `rms_norm_gated`: normal, weight around 1, equal on every device."""
        draw = torch.Generator().manual_seed(seed)
        shape, width = (self.tokens, self.heads, self.dim), self.heads * self.dim
        x = make.normal(shape, draw).to(device, dtype)
        weight = 1 + make.normal((self.dim,), draw) / 4
        z = make.normal((self.tokens, width + self.behind), draw).to(device, dtype)
        return {
            "x": x,
            "weight": weight.to(device, self.weight_dtype or dtype),
            "z": z[:, :width].unflatten(1, shape[1:]),
            "norm_before_gate": self.norm_before_gate,
            "activation": self.activation,
            "group_size": self.group_size,
        }


def odd_cases():
    """Yield cases of odd sizes for each formula and activation, with and without a strided z."""
    shapes = ((0, 60), (1, 7), (63, 60), (65, 129), (31, 256))
    for index, (tokens, dim) in enumerate(shapes):
        for before in (True, False):
            activation = "silu" if (index + before) % 2 else "sigmoid"
            name = f"odd-t{tokens}-d{dim}-{'before' if before else 'after'}-{activation}"
            yield Case(name, tokens, 3, dim, 5 * (index % 2), before, activation)


CASES = [
    # Qwen3-Next and Qwen3.5 have 32 value heads of 128; a rank has 1/TP of them.
    *(
        Case(f"qwen3-next-tp{tp}-t{tokens}", tokens, 32 // tp, 128, large=tokens > 64)
        for tp in (1, 4)
        for tokens in (1, 64, 512, 8192, 20480)
    ),
    Case("qwen3-next-fused-t8", 8, 32, 128, 4096, weight_dtype=torch.float32),
    *odd_cases(),
    Case("mamba2-groups", 9, 1, 1024, 0, False, group_size=256),  # as in Mamba-2 layers
    Case("groups-before-t33", 33, 1, 96, 0, True, "sigmoid", 32),
    Case("one-group-each-t5", 5, 2, 12, 0, True, "silu", 4),
    Case("wide-4096", 5, 1, 4096, 0, False),
    Case("wide-8192", 3, 1, 8192, 64),
    Case("wide-groups", 3, 1, 10000, group_size=5000),
    Case("wide-9000-after-sigmoid", 2, 1, 9000, 0, False, "sigmoid"),
]

# The arguments that have a gradient.
DIFFERENTIABLE = ("x", "weight", "z")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-next-tp1-t64", "qwen3-next-fused-t8", "odd-t63-d60-after-sigmoid", "mamba2-groups",
    "wide-8192", "wide-9000-after-sigmoid", "wide-groups",
)  # fmt: skip

CALLS = [
    Call("rms_norm_gated", lambda draw: {"x": draw(3, 8), "weight": draw(8), "z": draw(3, 8)}),
]


def _wide(dim: int) -> dict:
    return dict.fromkeys("xz", shaped(2, dim)) | {"weight": shaped(dim)}


# Invalid calls, and the error of each.
WRONG = [
    *wrong("rms_norm_gated", ValueError,
        *shapes("weight", "[8], x's last dimension", (1,), (7,), (3, 8)),
        ("weight: got shape [4], needs [8], x's last", {"weight": shaped(4), "group_size": 4}),
        *shapes("z", "x's shape [3, 8]", (8,), (3, 1), (4, 8)),
        *values("eps", "a finite number, 0 or more", -1.0, math.nan, math.inf, None, "1e-6"),
        *values("activation", "one of 'silu', 'sigmoid'", "relu", "SiLU", "", None, True, ["silu"]),
        *values("group_size", "a divisor of 8", 0, -4, 3, 16, 4.0, "4"),
    ),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("rms_norm_gated", {"eps": 0.5}, {"activation": "sigmoid"},
             {"norm_before_gate": False}),
    *options("rms_norm_gated", {"group_size": 4}, {"group_size": 2}),
    *options("rms_norm_gated", {"eps": 1e-6}, {"group_size": 8}, {"activation": "silu"}, same=True),
]  # fmt: skip
# Calls that the AscendC kernel does not support.
DECLINED = declined("rms_norm_gated", "ascendc",
    ("rows of 16385 elements are longer than 16384", _wide(16385)), given=_wide(16384),
)  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of Gated Delta Net's outputs."""
    return [Case("linear", tokens, model.linear[1], LINEAR_DIM)] if model.linear else []
