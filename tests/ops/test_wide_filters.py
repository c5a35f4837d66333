"""Filters of 5 to 8 taps in causal_conv1d_qkv and causal_conv1d_update.

The cases of causal_conv1d already include such filters.
"""

import types

import pytest
import torch
from support import assert_all_close, evaluate, floats, forced, implementations, on_device

import npu_ops
from npu_ops.core.compare import assert_close
from npu_ops.ops.causal_conv1d.arguments import narrow_alone
from npu_ops.ops.causal_conv1d.cases import TOLERANCES
from npu_ops.ops.causal_conv1d_qkv import op as qkv
from npu_ops.ops.causal_conv1d_qkv.cases import TOLERANCES as QKV_TOLERANCES
from npu_ops.ops.causal_conv1d_update import op as update

WIDTHS = pytest.mark.parametrize("width", [5, 6, 7, 8])
# Implementations whose kernels support at most 4 taps: each tap is a variable of its own.
NARROW = {"triton_ascend", "ascendc"}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def refused(implementation, width, function, *args, **kwargs):
    """Check that an implementation with narrow kernels raises; return whether it is one."""
    if implementation in NARROW:
        with pytest.raises(RuntimeError, match=f"a filter of {width} taps has more than 4"):
            function(*args, **kwargs)
    return implementation in NARROW


@pytest.mark.parametrize("width", range(2, 9))
def test_kernels_with_a_name_for_each_tap_have_four(width):
    call = types.SimpleNamespace(weight=torch.empty(8, width))
    assert (narrow_alone(call) is None) == (width <= 4)


@WIDTHS
@pytest.mark.parametrize("implementation, device", implementations(qkv.forward.table))
def test_qkv(width, implementation, device):
    """Test packed sequences, some shorter than the filter, with norms, states and gradients."""
    inputs = {
        "x": drawn(1, 23, 48), "weight": drawn(48, width), "bias": drawn(48),
        "initial_state": drawn(4, 48, width),
    }  # fmt: skip
    settings = {
        "num_k_heads": 2, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8,
        "output_final_state": True, "activation": "silu",
        "cu_seqlens": torch.tensor([0, 3, 3, 11, 23]),
    }  # fmt: skip

    def run(name, tensors):
        with forced(name, "causal_conv1d_qkv", "causal_conv1d_qkv_backward"):
            return evaluate(npu_ops.causal_conv1d_qkv, tensors, tuple(inputs))

    given = on_device(inputs | settings, device)
    if not refused(implementation, width, run, implementation, given):
        expected = run("reference", floats(inputs, torch.float64) | settings)
        assert_all_close(run(implementation, given), expected, QKV_TOLERANCES)


@WIDTHS
@pytest.mark.parametrize("implementation, device", implementations(update.forward.table))
def test_steps_after_a_prefill_are_the_prefill(width, implementation, device):
    x, weight, bias = (t.to(device) for t in (drawn(3, 12, 40), drawn(40, width), drawn(40)))
    expected, final = npu_ops.causal_conv1d(
        x, weight, bias, activation="silu", output_final_state=True
    )
    _, state = npu_ops.causal_conv1d(
        x[:, :9], weight, bias, activation="silu", output_final_state=True
    )
    pool = state[..., 1:].contiguous()

    def step(tokens):
        with forced(implementation, "causal_conv1d_update"):
            return npu_ops.causal_conv1d_update(tokens, pool, weight, bias, activation="silu")

    if refused(implementation, width, step, x[:, 9:10]):
        return
    y = torch.cat([step(x[:, 9:10]), step(x[:, 10:])], 1)
    assert_close("y", y, expected[:, 9:], TOLERANCES[torch.float32])
    assert torch.equal(pool, final[..., 1:])
