"""Named shapes and tolerances of the causal convolution, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, cast, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import Model

# Against fp64 on the same inputs: one rounding to the dtype, after arithmetic in fp32.
TOLERANCES = tolerances((2e-15, 2e-14), (5e-7, 2e-6), (4e-4, 1e-3), (3e-3, 8e-3))

# Channels of one layer's convolution (q, k and v together).
CHANNELS = {"qwen3-next": 8192, "qwen3.5-0.8b": 6144}


@dataclasses.dataclass(frozen=True)
class Case:
    """x is [batch, tokens, channels], or packed sequences if there are `lengths`.

    lengths: "" for none; "even" for four equal sequences; "odd" for edge cases: empty sequences,
    single tokens, fewer tokens than filter taps.
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
        """Return arguments of `causal_conv1d`: normal numbers, the same on every device."""
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
        """Return the starts of the packed sequences, and the end of the last."""
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

# The arguments that have a gradient.
DIFFERENTIABLE = ("x", "weight", "bias", "residual", "initial_state")
# Together, these cases take every branch of the Triton kernels.
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

# Invalid calls, and the error of each.
_OF_A_POOL = {
    "initial_state": None, "output_final_state": False, "residual": None,
     "conv_state": shaped(4, 8, 3), "conv_state_indices": make.indices([2, 1]),
}  # fmt: skip
WRONG = [
    *wrong("causal_conv1d", ValueError,
        *shapes("x", "[B, T, D]", (9, 8)),
        *shapes("weight", "[8, W] with W 2 to 8", (8, 9), (8, 1), (7, 4), (8, 1, 4)),
        *shapes("bias", "[8]", (1,)),
        *values("activation", "one of None, 'silu', 'swish'", "gelu", True),
        *shapes("residual", "x's shape [1, 9, 8]", (1, 9, 1)),
        *shapes("initial_state", "[N, D, W], here [2, 8, 4]", (2, 8, 3), (2, 4, 8), (1, 8, 4)),
        *shapes("cu_seqlens", "one dimension", (1, 3)),
        *shapes("cu_seqlens", "[N + 1]", (0,), (1,)),
        ("x: got shape [2, 9, 8], needs a batch of 1", {"x": shaped(2, 9, 8), "residual": None}),
    ),
    *wrong("causal_conv1d", TypeError,
        ("weight: got float16, needs x's float32", {"weight": torch.Tensor.half}),
        ("bias: got bfloat16, needs x's float32", {"bias": torch.Tensor.bfloat16}),
        ("residual: got float64, needs x's float32", {"residual": cast(torch.float64)}),
        ("initial_state: got bfloat16, needs x's", {"initial_state": torch.Tensor.bfloat16}),
    ),
    *wrong("causal_conv1d", ValueError,
        ("cu_seqlens: got 0 first and 10 last, needs 0 and up", {"cu_seqlens": replaced(2, to=10)}),
        ("cu_seqlens: got 1 first and 9 last, needs 0 and up", {"cu_seqlens": replaced(0, to=1)}),
        ("cu_seqlens: got a negative length, needs starts", {"cu_seqlens": replaced(1, to=10)}),
        reads=True),
    *wrong("causal_conv1d", ValueError,
        ("conv_state_indices: got 1 twice, needs", {"conv_state_indices": make.indices([1, 1])}),
        ("conv_state_indices: got 1 to 4, needs 0", {"conv_state_indices": make.indices([4, 1])}),
        ("conv_state_indices: got -2 to 1, needs", {"conv_state_indices": make.indices([1, -2])}),
        given=_OF_A_POOL, reads=True),
    *wrong("causal_conv1d", ValueError,
        ("conv_state_indices: got shape [1], needs [2]", {"conv_state_indices": make.indices([1])}),
        ("conv_state_indices: got device meta, needs x's",
         {"conv_state_indices": make.indices([1, 2]).to("meta")}),
        *shapes("conv_state", "[slots, 8, L], L from 3", (4, 8, 2), (4, 7, 3), (4, 8)),
        ("conv_state: got device meta, needs x's", {"conv_state": lambda x: x.to("meta")}),
        ("conv_state: got an expanded tensor, needs memory for each element",
         {"conv_state": lambda x: x[:1].expand(4, 8, 3)}),
        ("conv_state: got shape [1, 8, 3], needs at least 2 slots",
         {"conv_state": shaped(1, 8, 3), "conv_state_indices": None}),
        *shapes("has_initial_state", "bool [2]", (2,)),
        ("has_initial_state: got shape [3], needs bool [2]",
         {"has_initial_state": shaped(3, dtype=torch.bool)}),
        ("has_initial_state: got device meta, needs x's",
         {"has_initial_state": shaped(2, dtype=torch.bool, device="meta")}),
        ("output_final_state: got True with conv_state, needs False", {"output_final_state": True}),
        ("initial_state: got a value with conv_state, needs None",
         {"initial_state": shaped(2, 8, 4)}),
        ("weight: got a tensor that requires a gradient, needs torch.no_grad() with",
         {"weight": torch.Tensor.requires_grad_}),
        ("conv_state_indices: got a value without conv_state, needs both", {"conv_state": None}),
        ("has_initial_state: got a value without conv_state, needs both",
         {"conv_state": None, "conv_state_indices": None,
          "has_initial_state": shaped(2, dtype=torch.bool)}),
        given=_OF_A_POOL),
    *wrong("causal_conv1d", TypeError,
        ("conv_state_indices: got list, needs a tensor", {"conv_state_indices": [0, 1]}),
        ("conv_state: got int64, needs float32, bfloat16", {"conv_state": torch.Tensor.long}),
        ("has_initial_state: got list, needs a tensor", {"has_initial_state": [True, False]}),
        given=_OF_A_POOL),
]  # fmt: skip
# Changes that every implementation must honour.
OPTIONS = [
    *options("causal_conv1d", {"bias": None}, {"residual": None}, {"activation": None},
             {"output_final_state": False}, {"initial_state": None},
             {"cu_seqlens": make.indices([0, 5, 9])}, {"cu_seqlens": make.indices([0, 4, 7])},
             {"weight": lambda x: x[:, :2],
              "initial_state": lambda x: x[..., :2]}),
    *options("causal_conv1d", {"activation": "swish"}, same=True),
    *options("causal_conv1d", {"conv_state_indices": make.indices([2, -1])},
             {"has_initial_state": make.indices([1, 0]).bool()}, {"pad_slot_id": 2},
             {"conv_state": shaped(2, 8, 3), "conv_state_indices": None},
             given=_OF_A_POOL, trains=False),
]  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the case of Gated Delta Net's q, k and v together."""
    return [Case("linear", tokens, model.linear_channels)] if model.linear else []
