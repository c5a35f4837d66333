"""Named shapes and tolerances of the causal convolution, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.compare import Tolerance
from npu_ops.core.models import Model

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = {
    torch.float64: Tolerance(ratio=2e-15, max_abs=2e-14),
    torch.float32: Tolerance(ratio=5e-7, max_abs=2e-6),
    torch.float16: Tolerance(ratio=4e-4, max_abs=1e-3),
    torch.bfloat16: Tolerance(ratio=3e-3, max_abs=8e-3),
}

# Channels of the convolution (q, k and v together) of one layer.
CHANNELS = {"qwen3-next": 8192, "qwen3.5-0.8b": 6144}


@dataclasses.dataclass(frozen=True)
class Case:
    """x is [batch, tokens, channels], or packed sequences if there are `lengths`.

    lengths: "" for none, "even" for tokens in four equal sequences, "odd" for what goes wrong:
        empty sequences, single tokens, fewer tokens than the filter is wide.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    channels: int
    width: int = 4
    batch: int = 1
    bias: bool = False
    residual: bool = False
    state: bool = False
    activation: str | None = "silu"
    lengths: str = ""
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `causal_conv1d`: normal, the same on every device."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return make.normal(shape, draw).to(device, dtype)

        starts = self.starts()
        count = self.batch if starts is None else len(starts) - 1
        inputs = {
            "x": normal(self.batch, self.tokens, self.channels),
            "weight": normal(self.channels, self.width),
            "activation": self.activation,
        }
        if self.bias:
            inputs["bias"] = normal(self.channels)
        if self.residual:
            inputs["residual"] = normal(self.batch, self.tokens, self.channels)
        if self.state:
            inputs["initial_state"] = normal(count, self.channels, self.width)
            inputs["output_final_state"] = True
        if starts is not None:
            inputs["cu_seqlens"] = starts.to(device)
        return inputs

    def starts(self) -> torch.Tensor | None:
        """The starts of the packed sequences and their end."""
        if not self.lengths:
            return None
        cut = [0, 0, 1, 2, 2, 5, 5] if self.lengths == "odd" else [0, 1, 2, 3]
        step = 1 if self.lengths == "odd" else self.tokens // 4
        starts = [min(step * n, self.tokens) for n in cut]
        return torch.tensor([*starts, self.tokens], dtype=torch.int32, device="cpu")


CASES = [
    *(
        Case(f"{model}-t{tokens}", tokens, channels, large=tokens > 64)
        for model, channels in CHANNELS.items()
        for tokens in (1, 64, 4096)
    ),
    Case("qwen3-next-tp4-t64", 64, 2048),
    Case("qwen3-next-packed-8192", 8192, 8192, lengths="even", state=True, large=True),
    Case("qwen3-next-packed-128", 128, 2048, lengths="even", state=True, bias=True),
    *(
        Case(f"odd-t{tokens}-w{width}-{kind}", tokens, 40, width, bias=width > 2, lengths=lengths,
             state=state, batch=1 if lengths else 3, residual=width == 3,
             activation=None if width == 2 else "silu")
        for tokens, width in ((0, 2), (1, 3), (2, 4), (7, 2), (63, 3), (65, 4))
        for kind, lengths, state in (
            ("plain", "", False), ("state", "", True), ("packed", "odd", False),
            ("packed-state", "odd", True),
        )
    ),
    Case("odd-channels", 65, 131, bias=True, state=True),
    *(
        Case(f"wide-w{width}-{kind}", tokens, 40, width, bias=width != 7, residual=width == 6,
             state=width != 6, activation=None if width == 7 else "silu", lengths=lengths,
             batch=1 if lengths else 2)
        for width, kind, tokens, lengths in (
            (5, "packed", 65, "odd"), (6, "plain", 63, ""), (7, "few", 3, ""), (8, "state", 65, ""),
            (8, "packed", 33, "even"),
        )
    ),
    Case("two-blocks", 33, 2100, bias=True, residual=True, state=True, lengths="odd"),
]  # fmt: skip

# What the function is differentiable in.
DIFFERENTIABLE = ("x", "weight", "bias", "residual", "initial_state")
# Across these, every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-next-t64", "qwen3-next-packed-128", "odd-t65-w4-packed-state", "odd-t63-w3-packed",
    "odd-t7-w2-plain", "two-blocks", "wide-w5-packed", "wide-w6-plain", "wide-w7-few",
)  # fmt: skip

CALLS = [
    Call(
        "causal_conv1d",
        lambda draw: {
            "x": draw(1, 9, 8), "weight": draw(8, 4), "bias": draw(8), "residual": draw(1, 9, 8),
            "initial_state": draw(2, 8, 4), "output_final_state": True, "activation": "silu",
            "cu_seqlens": make.indices([0, 4, 9]),
        },
    ),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Gated Delta Net's q, k and v together."""
    return [Case("linear", tokens, model.linear_channels)] if model.linear else []
