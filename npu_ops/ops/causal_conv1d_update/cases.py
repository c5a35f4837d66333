"""Named shapes and tolerances of the convolution's decoding step."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call
from npu_ops.core.models import Model
from npu_ops.ops.causal_conv1d.cases import CHANNELS, TOLERANCES

__all__ = ["CALLS", "CASES", "DIFFERENTIABLE", "REPRESENTATIVE", "TOLERANCES", "Case", "of_model"]


@dataclasses.dataclass(frozen=True)
class Case:
    """`sequences` of `tokens` each, or of lengths from 0 to `tokens` if they are packed.

    mode: "decode", "vllm" (accepted tokens), or "sglang" (a window for each token).
    channels_last: the pool's channels are in one piece.
    """

    name: str
    tokens: int
    sequences: int
    channels: int
    width: int = 4
    mode: str = "decode"
    packed: bool = False
    bias: bool = False
    channels_last: bool = True
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Arguments of `causal_conv1d_update`; every third sequence is skipped."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return make.normal(shape, draw).to(device, dtype)

        slots, columns = self.sequences + 3, self.width - 1
        if self.mode == "vllm":
            columns += max(self.tokens, 1)
        state = normal(slots, columns, self.channels).transpose(1, 2)
        indices = make.shuffled(slots, draw)[: self.sequences].int()
        indices[1::3] = -1
        inputs = {
            "x": normal(*self._shape(), self.channels),
            "conv_state": state if self.channels_last else state.contiguous(),
            "weight": normal(self.channels, self.width),
            "activation": "silu" if self.width > 2 else None,
            "conv_state_indices": indices.to(device),
        }
        if self.bias:
            inputs["bias"] = normal(self.channels)
        if self.packed:
            inputs["query_start_loc"] = self._starts().to(device)
        if self.mode == "vllm":
            accepted = make.counted(self.sequences) % max(self.tokens, 1) + 1
            inputs["num_accepted_tokens"] = accepted.int().to(device)
        if self.mode == "sglang":
            window = normal(self.sequences, self.tokens, self.width - 1, self.channels)
            inputs["intermediate_conv_window"] = window.transpose(2, 3)
            inputs["disable_state_update"] = self.bias
        return inputs

    def _shape(self) -> tuple[int, ...]:
        if self.packed:
            return (int(self._starts()[-1]) + 1,)  # one token is of no sequence
        return (self.sequences, self.tokens)

    def _starts(self) -> torch.Tensor:
        lengths = make.counted(self.sequences).flip(0) % (self.tokens + 1)
        return torch.cat([torch.zeros(1, dtype=torch.int32, device="cpu"), lengths.cumsum(0).int()])


CASES = [
    *(
        Case(f"{model}-b{batch}", 1, batch, channels, large=batch > 1)
        for model, channels in CHANNELS.items()
        for batch in (1, 32)
    ),
    Case("qwen3-next-b8-vllm", 4, 8, 8192, mode="vllm", large=True),
    Case("qwen3-next-b8-sglang", 4, 8, 8192, mode="sglang", large=True),
    *(
        Case(f"{mode}-t{tokens}-w{width}{'-packed' if packed else ''}", tokens, 5, 40, width, mode,
             packed, bias=width == 3)
        for mode in ("decode", "vllm", "sglang")
        for tokens, width in ((0, 4), (1, 4), (2, 2), (3, 3), (16, 4))
        for packed in ((False,) if mode == "sglang" else (False, True))
    ),
    Case("three-blocks", 1, 5, 96),
    Case("channels-first", 2, 5, 1100, channels_last=False, bias=True),
    Case("channels-first-vllm", 3, 4, 40, mode="vllm", channels_last=False),
]  # fmt: skip

# There is no gradient.
DIFFERENTIABLE = ()
# Across these, every branch of the Triton kernel.
REPRESENTATIVE = (
    "qwen3-next-b1", "qwen3-next-b8-vllm", "qwen3-next-b8-sglang", "decode-t2-w2-packed",
    "vllm-t3-w3-packed", "sglang-t3-w3", "channels-first", "channels-first-vllm",
)  # fmt: skip

CALLS = [
    Call(
        "causal_conv1d_update",
        lambda draw: {
            "x": draw(2, 8), "conv_state": draw(4, 8, 3), "weight": draw(8, 4), "bias": draw(8),
            "conv_state_indices": make.indices([2, 1]),
            "intermediate_conv_window": draw(2, 1, 8, 3),
        },
        writes=("conv_state", "intermediate_conv_window"),
    ),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """A token of one sequence."""
    return [Case("decode", 1, 1, model.linear_channels)] if model.linear else []
