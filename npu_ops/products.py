"""With NPU_OPS_CONSISTENT all products with a matrix are `npu_ops.linear`.

PyTorch's choose how they sum by the number of rows, so that a model gives a decoded token other
bits than in training. Replaced are torch's operators `linear` and `matmul`: what models, trainers
and servers call, whatever the Python function is; and `conv3d` where it embeds patches of pictures,
which is a product. Their gradients, `mm`, `bmm` and everything that is not in fp32, bf16 or fp16
stay PyTorch's.
"""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.ops.linear import linear
from npu_ops.ops.linear.formats import format_why_not

__all__ = ["install", "installed", "remove"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Replace the products of this process, once: on NPUs, and where torch has none, on the CPU.

    Raises:
        RuntimeError: on a CPU, the native kernels are not there, which compute them.
    """
    if _libraries:
        return
    device = "PrivateUse1" if hasattr(torch, "npu") else "CPU"
    if device == "CPU" and (why := library.native_why_not()):
        raise RuntimeError(f"NPU_OPS_CONSISTENT: products on a CPU need the native kernels: {why}")
    aten = torch.library.Library("aten", "IMPL")
    for key in (device, f"Autograd{device}"):
        aten.impl("linear", _linear, key)
        aten.impl("matmul", _matmul, key)
        aten.impl("conv3d", _conv3d, key)
    _libraries.append(aten)
    _forget_what_was_traced()


def installed() -> bool:
    """Whether products are replaced."""
    return bool(_libraries)


def remove() -> None:
    """Give PyTorch its own back."""
    for aten in _libraries:
        aten._destroy()
    _libraries.clear()
    _forget_what_was_traced()


def _forget_what_was_traced() -> None:
    """Make torch look up the kernels of these operators again: its dispatcher in Python keeps those
    that it found when it first traced them."""
    for name in ("linear", "matmul", "conv3d"):
        operator = getattr(torch.ops.aten, name).default
        operator._dispatch_cache.clear()


def _linear(x, weight, bias=None):
    if not _ours(x, weight) or (bias is not None and bias.dtype != x.dtype):
        return torch.ops.aten.linear.default.decompose(x, weight, bias)
    return linear(x, _plain("weight", weight), bias)


def _matmul(x, other):
    if not _ours(x, other) or x.shape[-1] != other.shape[0]:
        return torch.ops.aten.matmul.default.decompose(x, other)
    return linear(_plain("x", x), _plain("other", other).t())


def _conv3d(x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    fills_it = x.dim() == weight.dim() == 5 and x.shape[1:] == weight.shape[1:]
    plain = not any(padding) and set(dilation) == {1} and groups == 1
    if not (fills_it and plain and _ours(x, weight, dims=5)):
        return torch.ops.aten.conv3d.default.decompose(
            x, weight, bias, stride, padding, dilation, groups
        )
    patches = x.reshape(x.shape[0], -1)
    return _linear(patches, weight.reshape(weight.shape[0], -1), bias)[..., None, None, None]


def _ours(x, matrix, dims: int = 2) -> bool:
    plain = x.layout is matrix.layout is torch.strided and x.device == matrix.device
    return plain and x.dim() > 0 and matrix.dim() == dims and x.dtype is matrix.dtype in _DTYPES


def _plain(name, x):
    """What has rows in memory, which the kernels read.

    Raises:
        ValueError: it has a format of the vendor's.
    """
    if why := format_why_not(x):
        raise ValueError(
            f"{name}: got {why}, needs ND for NPU_OPS_CONSISTENT: set "
            "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT=1 (SGLang) or VLLM_ASCEND_ENABLE_NZ=0 (vLLM)"
        )
    return x
