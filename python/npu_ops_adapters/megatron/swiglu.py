"""Replaces SwiGLU's forward and backward functions, which Megatron's autograd functions call.

Megatron still handles biases, experts' weights, and inputs that are kept in fp8 or offloaded.
MindSpeed has its own autograd function, which calls neither function. With NPU_OPS_CONSISTENT
Megatron's functions run, because they round silu(gate), as transformers does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, env
from npu_ops.ops.swiglu import op
from npu_ops_adapters.calls import check_device, falling_through
from npu_ops_adapters.patching import Patch

_HOME = "megatron.core.fusions.fused_bias_swiglu"


def patches() -> Iterable[Patch]:
    """Patch `swiglu` and `swiglu_back`."""
    for name, ours, names in (
        ("swiglu", forward, ("y",)),
        ("swiglu_back", backward, ("g", "y")),
    ):
        yield Patch(
            target=f"{_HOME}:{name}",
            op="swiglu",
            make=functools.partial(falling_through, ours, op="swiglu"),
            why="without torch.compile it launches two kernels, and nine in backward",
            signatures=(names,),
            versions="Megatron-Core 0.12 to 0.19",
            remove_when="Megatron-Core calls an operator here that has an NPU kernel",
        )


def forward(y) -> Callable:
    """Return the npu-ops call for this call of Megatron. npu-ops rounds once, Megatron twice.

    y: `[..., 2 d]`, the gate followed by up.
    """
    _check(y)
    return functools.partial(npu_ops.swiglu, y)


def backward(g, y) -> Callable:
    """Return the npu-ops call for this call of `swiglu_back`.

    g: `[..., d]`, the gradient of the output. The result, the gradient of y, has y's dtype; all
    callers cast it to that dtype anyway.
    """
    _check(y)
    check.floating("g", g)
    check.one_of("g's dtype", g.dtype, check.KERNEL_DTYPES)
    check.same_device("g", g, "y", y)
    if g.shape != (*y.shape[:-1], y.shape[-1] // 2):
        raise check.shape("g", g, f"that of one half of y, {list(y.shape)}")
    check.no_gradient({"g": g, "y": y}, "")
    return lambda: op.backward(g, y, None)[0]


def _check(y) -> None:
    check.floating("y", y)
    check.one_of("y's dtype", y.dtype, check.KERNEL_DTYPES)
    check_device(y)
    if type(y) not in (torch.Tensor, torch.nn.Parameter) or y.dim() == 0 or y.shape[-1] % 2:
        raise check.shape("y", y, "an even last dimension, and a plain tensor")
    if env.settings.consistent:
        raise ValueError("NPU_OPS_CONSISTENT also rounds silu(gate), npu-ops' kernel does not")
