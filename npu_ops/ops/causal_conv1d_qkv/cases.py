"""Named shapes and tolerances of causal_conv1d_qkv, for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses
import math

import torch

from npu_ops.core import make
from npu_ops.core.cases import Call, declined, options, replaced, shaped, shapes, values, wrong
from npu_ops.core.compare import tolerances
from npu_ops.core.models import LINEAR_DIM, Model
from npu_ops.ops.causal_conv1d import cases as conv

# Measured against fp64 on the same inputs: fp32 arithmetic, then one rounding to the dtype.
TOLERANCES = tolerances((4e-15, 4e-14), (1e-6, 4e-6), (4e-4, 1e-3), (3e-3, 8e-3))


@dataclasses.dataclass(frozen=True)
class Case:
    """x is [batch, tokens, 2 HK K + HV V], or packed sequences if there are `lengths`.

    heads: HK, HV, K, V.
    lengths: as in causal_conv1d's cases.
    large: takes seconds; for benchmarks and `make test-all`.
    """

    name: str
    tokens: int
    heads: tuple[int, int, int, int]
    width: int = 4
    batch: int = 1
    bias: bool = False
    state: bool = False
    activation: str | None = "silu"
    lengths: str = ""
    normalised: bool = True
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return arguments of `causal_conv1d_qkv`: normal, the same on every device."""
        key_heads, value_heads, key_dim, value_dim = self.heads
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        inputs = conv.Case(
            self.name, self.tokens, channels, self.width, self.batch, self.bias, state=self.state,
            activation=self.activation, lengths=self.lengths,
        ).inputs(dtype, device, seed)  # fmt: skip
        return inputs | {
            "num_k_heads": key_heads, "num_v_heads": value_heads, "head_k_dim": key_dim,
            "head_v_dim": value_dim, "use_qk_l2norm": self.normalised,
        }  # fmt: skip


# HK, HV, K, V of Qwen3.5-9B and Qwen3-Next-80B; then those of one of 4 tensor-parallel ranks.
QWEN, QWEN_TP4 = (16, 32, 128, 128), (4, 8, 128, 128)
CASES = [
    *(Case(f"qwen3-next-t{tokens}", tokens, QWEN, large=tokens > 64) for tokens in (1, 64, 4096)),
    Case("qwen3-next-packed-8192", 8192, QWEN, lengths="even", state=True, large=True),
    Case("qwen3-next-tp4-t64", 64, QWEN_TP4),
    Case("qwen3-next-packed-128", 128, QWEN_TP4, lengths="even", state=True, bias=True),
    *(
        Case(f"odd-t{tokens}-w{width}-{kind}", tokens, heads, width, bias=width > 2,
             lengths=lengths, state=state, batch=1 if lengths else 2,
             activation=None if width == 2 else "silu")
        for tokens, width, heads in (
            (0, 2, (1, 1, 16, 16)), (1, 3, (1, 2, 16, 24)), (7, 2, (3, 3, 16, 20)),
            (63, 3, (2, 2, 20, 16)), (65, 4, (3, 1, 24, 33)),
        )
        for kind, lengths, state in (
            ("plain", "", False), ("packed-state", "odd", True),
        )
    ),
    Case("odd-plain-keys", 33, (2, 3, 24, 16), lengths="odd", normalised=False),
    Case("odd-dim-256", 9, (2, 1, 256, 256), batch=2),
    Case("odd-dim-96", 9, (2, 3, 96, 96), state=True, lengths="odd"),
]  # fmt: skip

# The arguments that have a gradient.
DIFFERENTIABLE = ("x", "weight", "bias", "initial_state")
# Together, these cases take every branch of the Triton kernels.
REPRESENTATIVE = (
    "qwen3-next-packed-128", "odd-t65-w4-packed-state", "odd-t63-w3-plain", "odd-t7-w2-plain",
    "odd-plain-keys",
)  # fmt: skip

CALLS = [
    Call(
        "causal_conv1d_qkv",
        lambda draw: {
            "x": draw(2, 5, 48), "weight": draw(48, 4), "bias": draw(48), "num_k_heads": 2,
            "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8, "initial_state": draw(2, 48, 4),
            "output_final_state": True,
        },
    ),
]  # fmt: skip

# Invalid calls, and the error of each.
_PACKED = {
    "x": shaped(1, 5, 48), "cu_seqlens": make.indices([0, 2, 5]),
}  # fmt: skip
WRONG = [
    *wrong("causal_conv1d_qkv", ValueError,
        *shapes("x", "[B, T, D]", (5, 48)),
        ("x: got shape [2, 5, 48], needs [B, T, 2 HK K + HV V], here [B, T", {"num_v_heads": 4}),
        *values("num_k_heads", "1 or more", 0),
        *values("num_v_heads", "1 or more", -3),
        *values("head_k_dim", "1 to 256", 257),
        *values("head_v_dim", "1 to 256", 0, 257),
        *values("eps", "a finite number, 0 or more", -1.0, math.nan, "1"),
        *shapes("weight", "[48, W] with W 2 to 8", (48, 9), (48, 1)),
        *shapes("bias", "[48]", (1,)),
        *values("activation", "one of None, 'silu', 'swish'", "gelu"),
        *shapes("initial_state", "[N, D, W], here [2, 48, 4]", (2, 48, 3), (1, 48, 4)),
        ("x: got shape [2, 5, 48], needs a batch of 1 with", {"cu_seqlens": make.indices([0, 5])}),
    ),
    *wrong("causal_conv1d_qkv", TypeError,
        ("num_k_heads: got float, needs an int", {"num_k_heads": 2.0}),
        ("num_v_heads: got bool, needs an int", {"num_v_heads": True}),
        ("head_v_dim: got NoneType, needs an int", {"head_v_dim": None}),
        ("weight: got float16, needs x's float32", {"weight": torch.Tensor.half}),
        ("initial_state: got bfloat16, needs x's", {"initial_state": torch.Tensor.bfloat16}),
    ),
    *wrong("causal_conv1d_qkv", TypeError,
        ("cu_seqlens: got list, needs a tensor", {"cu_seqlens": [0, 5]}),
        given=_PACKED),
    *wrong("causal_conv1d_qkv", ValueError,
        ("cu_seqlens: got 0 first and 6 last, needs 0 and up", {"cu_seqlens": replaced(2, to=6)}),
        ("cu_seqlens: got a negative length, needs starts", {"cu_seqlens": replaced(1, to=6)}),
        given=_PACKED, reads=True),
]  # fmt: skip
# Valid changes of arguments: every implementation must honour them as the reference does.
OPTIONS = [
    *options("causal_conv1d_qkv", {"bias": None}, {"activation": None}, {"eps": 1.0},
             {"use_qk_l2norm": False}, {"output_final_state": False}, {"initial_state": None}),
    *options("causal_conv1d_qkv", {"activation": "silu"}, {"eps": 1e-6}, same=True),
    *options("causal_conv1d_qkv", {"cu_seqlens": make.indices([0, 4, 5])},
             {"cu_seqlens": make.indices([0, 2, 4])}, given=_PACKED),
]  # fmt: skip
# Calls that the Triton kernel does not support.
DECLINED = declined("causal_conv1d_qkv", "triton_ascend",
    ("a filter of 5 taps has more than 4",
     {"weight": shaped(48, 5), "initial_state": shaped(2, 48, 5)}),
)  # fmt: skip


def of_model(model: Model, tokens: int) -> list[Case]:
    """Return the cases of Gated Delta Net's layers in training."""
    return [Case("linear", tokens, (*model.linear, *[LINEAR_DIM] * 2))] if model.linear else []
