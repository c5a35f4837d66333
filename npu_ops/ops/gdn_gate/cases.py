"""Named shapes and tolerances of gdn_gate, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, declined, options, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype. The
# fp32 tolerances also cover the gradients of A_log and dt_bias, which are sums over all tokens.
TOLERANCES = tolerances((1e-14, 1e-13), (2e-6, 2e-6), (4e-4, 6e-4), (3e-3, 5e-3))


@dataclasses.dataclass(frozen=True)
class Case:
    """a and b are [tokens, heads], slices of one projection; A_log and dt_bias are fp32.

    bias, beta: whether dt_bias and b are passed. large: takes seconds; for benchmarks and
    `make test-all`.
    """

    name: str
    tokens: int
    heads: int
    bias: bool = True
    beta: bool = True
    allow_neg_eigval: bool = False
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of `gdn_gate`: normal a and b; A_log and dt_bias as in a new model."""
        draw = torch.Generator().manual_seed(seed)
        ba = make.normal((self.tokens, 2 * self.heads), draw) * 3
        b, a = ba.to(device, dtype).chunk(2, dim=-1)
        decay = make.uniform((self.heads,), draw) * 16
        return {
            "a": a,
            "A_log": decay.clamp(0.01).log().to(device),
            "dt_bias": make.normal((self.heads,), draw).to(device) if self.bias else None,
            "b": b if self.beta else None,
            "allow_neg_eigval": self.allow_neg_eigval,
        }


CASES = [
    # Qwen3-Next and Qwen3.5 have at least 32 value heads; a rank has 1/TP of them.
    *(
        Case(f"qwen3-next-tp{tp}-t{tokens}", tokens, 32 // tp, large=tokens > 512)
        for tp in (1, 4)
        for tokens in (1, 64, 512, 8192, 20480)
    ),
    Case("qwen3-next-no-beta", 64, 32, beta=False),
    Case("qwen3-next-no-bias", 64, 48, bias=False),
    *(
        Case(f"odd-t{tokens}-h{heads}", tokens, heads, allow_neg_eigval=heads % 2 == 0)
        for tokens, heads in ((0, 5), (1, 1), (63, 6), (65, 33), (131, 100), (1031, 3))
    ),
    Case("neither", 65, 7, bias=False, beta=False),
    Case("many-heads", 9, 1500),
    Case("whole-blocks-neg-eigval", 9, 32, allow_neg_eigval=True),
]

# The arguments that have a gradient.
DIFFERENTIABLE = ("a", "A_log", "dt_bias", "b")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = ("qwen3-next-tp1-t64", "qwen3-next-tp4-t64", "neither", "many-heads")

CALLS = [
    Call(
        "gdn_gate",
        lambda draw: {"a": draw(3, 4), "A_log": draw(4), "dt_bias": draw(4), "b": draw(3, 4)},
    ),
]


def _heads(count: int) -> dict:
    rows = dict.fromkeys("ab", shaped(3, count))
    return rows | dict.fromkeys(("A_log", "dt_bias"), shaped(count))


# Invalid calls, and the error of each.
WRONG = [
    *wrong("gdn_gate", ValueError,
        *shapes("A_log", "[4], one number for each head of a", (1,), (3,), (1, 4), (3, 4)),
        *shapes("dt_bias", "[4], one number for each head of a", (1,), (5,), (3, 4)),
        *shapes("b", "a's shape [3, 4]", (4,), (3, 1), (4, 4)),
        ("allow_neg_eigval: got True, needs b", {"b": None, "allow_neg_eigval": True}),
        *values("softplus_beta", "a number above 0", 0.0, -1.0, math.inf, math.nan),
        *values("softplus_threshold", "0 or more", -1, math.nan),
        *values("softplus_beta", "a number above 0", "1"),
        *values("softplus_threshold", "0 or more", "1"),
    ),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("gdn_gate", {"allow_neg_eigval": True}, {"dt_bias": None}, {"b": None}),
    *options("gdn_gate", {"softplus_beta": 2.0}, {"softplus_threshold": 0.5}),
    *options("gdn_gate", {"softplus_beta": 1}, {"softplus_threshold": 20}, same=True),
]  # fmt: skip
# Calls that the AscendC kernel does not support.
DECLINED = [
    *declined("gdn_gate", "ascendc",
        ("softplus has beta 2.0", {"softplus_beta": 2.0}),
        ("softplus has beta 1.0, threshold 0.5", {"softplus_threshold": 0.5}),
    ),
    *declined("gdn_gate", "ascendc",
        ("rows of 8193 elements are longer than 8192", _heads(8193)), given=_heads(8192)),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of Gated Delta Net's value heads."""
    return [Case("linear", tokens, model.linear[1])] if model.linear else []
