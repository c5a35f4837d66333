"""Named shapes and tolerances of grouped_linear. npu_ops/core/cases.py explains the names."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, cast, replaced, shaped, shapes, wrong
from npu_ops.core.models import Model
from npu_ops.ops.linear.cases import TOLERANCES

__all__ = ["TOLERANCES"]


@dataclasses.dataclass(frozen=True)
class Case:
    """x `[tokens, depth]`, of which `behind` rows are in no group; weight `[groups, columns,
    depth]`.

    The first group is empty if there is more than one; the others have random sizes.
    """

    name: str
    tokens: int
    groups: int
    depth: int
    columns: int
    behind: int = 0
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the function's arguments: normal, with weights such that results are normal."""
        draw = torch.Generator(device="cpu").manual_seed(seed)
        x = make.normal((self.tokens, self.depth), draw)
        weight = make.normal((self.groups, self.columns, self.depth), draw) / self.depth**0.5
        last = max(0, self.tokens - self.behind)
        offs = make.integers(last + 1, (self.groups,), draw).sort().values.int()
        offs[-1:] = last
        if self.groups > 1:
            offs[0] = 0
        given = {"x": x.to(device, dtype), "weight": weight.to(device, dtype)}
        return given | {"offs": offs.to(device)}


CASES = [
    Case("three-groups-t150", 150, 3, 200, 130, behind=5),
    *(Case(f"qwen3-30b-a3b-up-t{n}", n, 128, 2048, 1536, large=True) for n in (8, 512, 8192)),
    Case("qwen3-30b-a3b-down-t512", 512, 128, 768, 2048, large=True),
    *(Case(f"odd-t{n}", n, groups, n + 7, 2 * n + 3, behind=n % 3)
      for n, groups in ((0, 2), (1, 1), (2, 5), (65, 9), (129, 2))),
]  # fmt: skip
DIFFERENTIABLE = ("x", "weight")
# Together, these cases take every branch of the Triton kernel.
REPRESENTATIVE = ("three-groups-t150", "odd-t2")
CALLS = [
    Call(
        "grouped_linear",
        lambda draw: {
            "x": draw(6, 8),
            "weight": draw(3, 5, 8),
            "offs": torch.tensor([2, 2, 5], dtype=torch.int32, device="cpu"),
        },
    ),
]
# Invalid calls, and the error of each.
WRONG = [
    *wrong("grouped_linear", ValueError,
        *shapes("x", "[T, K]", (8,), (2, 3, 8)),
        *shapes("weight", "[G, N, 8], x's last dimension", (5, 8), (3, 5, 7), (3, 8, 5)),
        *shapes("offs", "[3], one for each matrix of weight", (2,), (4,), (3, 1))),
    *wrong("grouped_linear", TypeError,
        ("weight: got float16, needs x's float32", {"weight": cast(torch.float16)}),
        ("offs: got float32, needs int32 or int64", {"offs": shaped(3, dtype=torch.float32)})),
    *wrong("grouped_linear", ValueError,
        ("offs: got 0 first and 9 last, needs 0 and up to 6", {"offs": replaced(2, to=9)}),
        ("offs: got a negative length", {"offs": replaced(0, to=4)}),
        ("offs: got a negative length", {"offs": replaced(0, to=-1)}),
        reads=True),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the cases of the experts of one of many expert-parallel ranks.

    The experts of a rank together get `tokens` tokens.
    """
    if model.expert is None:
        return []
    up = Case("up", tokens, 8, model.hidden, 2 * model.expert)
    return [up, Case("down", tokens, 8, model.expert, model.hidden)]
