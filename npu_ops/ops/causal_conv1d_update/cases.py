"""Named shapes and tolerances of the convolution's decoding step, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import (
    Call,
    cast,
    declined,
    options,
    replaced,
    shaped,
    shapes,
    values,
    wrong,
)
from npu_ops.core.models import Model
from npu_ops.ops.causal_conv1d.cases import CHANNELS, TOLERANCES

__all__ = ["CALLS", "CASES", "DIFFERENTIABLE", "REPRESENTATIVE", "TOLERANCES", "Case", "of_model"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a call.

    tokens: per sequence; packed sequences have lengths from 0 to `tokens`.
    mode: "decode", "vllm" (num_accepted_tokens) or "sglang" (a window for each token).
    channels_last: the pool's channels are contiguous.
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
        """Return arguments of `causal_conv1d_update`; every third sequence is skipped."""
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
            return (int(self._starts()[-1]) + 1,)  # the last token belongs to no sequence
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

# The function has no gradient.
DIFFERENTIABLE = ()
# Together, these cases take every branch of the Triton kernel.
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


def _in_pieces(right):
    """Return a view with the same values whose last dimension has stride 2."""
    return right.repeat_interleave(2, -1)[..., ::2]


# Invalid calls, and the error of each.
_PACKED = {
    "x": shaped(6, 8), "query_start_loc": make.indices([0, 3, 6]), "intermediate_conv_window": None,
}  # fmt: skip
_VERIFIED = {
    "x": shaped(2, 3, 8), "conv_state": shaped(4, 8, 5), "intermediate_conv_window": None,
     "num_accepted_tokens": make.indices([3, 1]),
}  # fmt: skip
_PACKED_VERIFIED = {
    "x": shaped(6, 8), "conv_state": shaped(4, 8, 5), "intermediate_conv_window": None,
     "query_start_loc": make.indices([0, 3, 6]), "num_accepted_tokens": make.indices([1, 1]),
}  # fmt: skip
WRONG = [
    *wrong("causal_conv1d_update", ValueError,
        *shapes("x", "[B, D] or [B, T, D]", (8,), (1, 2, 1, 8)),
        *shapes("conv_state", "[slots, 8, L] with L 3 or more", (4, 3, 8), (4, 8, 2), (4, 24)),
        ("conv_state: got an expanded tensor, needs memory for each element",
         {"conv_state": lambda x: x[:1].expand(4, 8, 3)}),
        ("conv_state: got shape [1, 8, 3], needs 2 slots without conv_state_indices",
         {"conv_state": shaped(1, 8, 3), "conv_state_indices": None}),
        *shapes("weight", "[8, W] with W 2 to 8", (8, 9), (8, 1)),
        ("weight: got a tensor that requires a gradient, needs torch.no_grad(): causal",
         {"weight": torch.Tensor.requires_grad_}),
        *shapes("bias", "[8]", (4,)),
        ("bias: got a tensor that requires a gradient, needs torch.no_grad(): causal",
         {"bias": torch.Tensor.requires_grad_}),
        ("x: got a tensor that requires a gradient, needs", {"x": torch.Tensor.requires_grad_}),
        *values("activation", "one of None, 'silu', 'swish'", True, "gelu"),
        *shapes("conv_state_indices", "[2]", (3,), (1, 2)),
        ("num_accepted_tokens: got shape [1], needs [2]",
         {"num_accepted_tokens": make.indices([1])}),
        ("intermediate_conv_window: got a value, needs",
         {"query_start_loc": make.indices([0, 1, 2])}),
        *shapes("intermediate_conv_window", "[rows, 1 or more, 8, 3]", (2, 1, 8, 2), (2, 0, 8, 3)),
        *shapes("intermediate_conv_window", "2 rows or more", (1, 1, 8, 3)),
        ("intermediate_conv_window: got an expanded tensor, needs memory for each",
         {"intermediate_conv_window": lambda x: x[:1].expand(2, 1, 8, 3)}),
        ("intermediate_state_indices: got shape [1], needs [2]",
         {"intermediate_state_indices": make.indices([0])}),
        ("intermediate_state_indices: got a value, needs intermediate_conv_window too",
         {"intermediate_conv_window": None, "intermediate_state_indices": make.indices([0, 1])}),
    ),
    *wrong("causal_conv1d_update", TypeError,
        ("conv_state: got bfloat16, needs x's float32", {"conv_state": torch.Tensor.bfloat16}),
        ("num_accepted_tokens: got list, needs a tensor", {"num_accepted_tokens": [1, 1]}),
        ("pad_slot_id: got NoneType, needs an int", {"pad_slot_id": None}),
        ("pad_slot_id: got float, needs an int", {"pad_slot_id": 1.0}),
        ("intermediate_conv_window: got float64, needs x's float32",
         {"intermediate_conv_window": cast(torch.float64)}),
        ("intermediate_state_indices: got list, needs a", {"intermediate_state_indices": [0, 1]}),
    ),
    *wrong("causal_conv1d_update", ValueError,
        ("conv_state_indices: got 1 to 4, needs 0 to 3", {"conv_state_indices": replaced(0, to=4)}),
        ("conv_state_indices: got -2 to 1, needs 0", {"conv_state_indices": replaced(0, to=-2)}),
        ("conv_state_indices: got 1 twice, needs each", {"conv_state_indices": replaced(0, to=1)}),
        ("num_accepted_tokens: got 0 to 1, needs", {"num_accepted_tokens": make.indices([0, 1])}),
        ("num_accepted_tokens: got 1 to 2, needs", {"num_accepted_tokens": make.indices([1, 2])}),
        ("intermediate_state_indices: got 0 to 2, needs -1 to 1",
         {"intermediate_state_indices": make.indices([0, 2])}),
        ("intermediate_state_indices: got -2 to 0, needs -1 to 1",
         {"intermediate_state_indices": make.indices([0, -2])}),
        ("intermediate_state_indices: got 0 twice, needs each at most once",
         {"intermediate_state_indices": make.indices([0, 0])}),
        reads=True),
    *wrong("causal_conv1d_update", TypeError,
        ("query_start_loc: got list, needs a tensor", {"query_start_loc": [0, 3, 6]}),
        given=_PACKED),
    *wrong("causal_conv1d_update", ValueError,
        ("conv_state_indices: got shape [2], needs [0]", {"query_start_loc": make.indices([0])}),
        ("conv_state_indices: got shape [2], needs [1]", {"query_start_loc": make.indices([0, 3])}),
        *shapes("x", "[tokens, D] with query_start_loc", (2, 3, 8)),
        ("intermediate_conv_window: got a value, needs no query_start_loc",
         {"intermediate_conv_window": shaped(2, 3, 8, 3)}),
        given=_PACKED),
    *wrong("causal_conv1d_update", ValueError,
        ("query_start_loc: got a negative length, needs starts that do not decrease",
         {"query_start_loc": make.indices([0, 4, 3])}),
        ("query_start_loc: got 0 first and 7 last, needs 0 and up to 6, the number",
         {"query_start_loc": make.indices([0, 3, 7])}),
        ("query_start_loc: got 1 first and 6 last, needs 0 and up to 6, the number",
         {"query_start_loc": make.indices([1, 3, 6])}),
        ("query_start_loc: got length 3, needs 1", {"num_accepted_tokens": make.indices([1, 1])}),
        given=_PACKED, reads=True),
    *wrong("causal_conv1d_update", ValueError,
        *shapes("conv_state", "[slots, 8, L] with L 5 or more", (4, 8, 4)),
        given=_VERIFIED),
    *wrong("causal_conv1d_update", ValueError,
        ("num_accepted_tokens: got 0 to 1, needs 1", {"num_accepted_tokens": replaced(0, to=0)}),
        ("num_accepted_tokens: got 1 to 4, needs 1", {"num_accepted_tokens": replaced(0, to=4)}),
        given=_VERIFIED, reads=True),
    *wrong("causal_conv1d_update", ValueError,
        ("query_start_loc: got length 5, needs 3", {"query_start_loc": make.indices([0, 5, 6])}),
        given=_PACKED_VERIFIED, reads=True),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("causal_conv1d_update", {"bias": None}, {"activation": "silu"},
             {"conv_state_indices": make.indices([2, -1])}, {"disable_state_update": True},
             {"intermediate_conv_window": None}, {"pad_slot_id": 2},
             {"intermediate_state_indices": make.indices([1, 0])},
             {"conv_state": lambda x: x[:2].contiguous(), "conv_state_indices": None}),
    *options("causal_conv1d_update", {"activation": None}, {"pad_slot_id": -7},
             {"intermediate_state_indices": make.indices([0, 1])}, same=True),
    *options("causal_conv1d_update", {"num_accepted_tokens": make.indices([1, 2])},
             given=_VERIFIED),
    *options("causal_conv1d_update", {"query_start_loc": make.indices([0, 2, 5])}, given=_PACKED),
]  # fmt: skip
# Calls that the AscendC kernel or the Triton kernel does not support.
_FIVE_TAPS = {
    "weight": shaped(8, 5), "conv_state": shaped(4, 8, 4), "intermediate_conv_window": None,
}  # fmt: skip
_CHANNELS_IN_ONE_PIECE = {
    name: lambda right: right.mT.contiguous().mT
    for name in ("weight", "conv_state", "intermediate_conv_window")
}
DECLINED = [
    *(one for given in ({}, _CHANNELS_IN_ONE_PIECE)
      for one in declined("causal_conv1d_update", "ascendc",
        ("a filter of 5 taps has more than 4", _FIVE_TAPS),
        *((f"neither channels nor columns of {name} are contiguous", {name: _in_pieces})
          for name in ("weight", "conv_state")),
        ("neither channels nor columns of window are", {"intermediate_conv_window": _in_pieces}),
        given=given)),
    *declined("causal_conv1d_update", "triton_ascend",
        ("a filter of 5 taps has more than 4", _FIVE_TAPS)),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of one token of one sequence."""
    return [Case("decode", 1, 1, model.linear_channels)] if model.linear else []
