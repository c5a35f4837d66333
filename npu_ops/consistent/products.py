"""Replaces torch's matrix products by `npu_ops.linear`.

PyTorch's order of summation depends on the number of rows, so a decoded token gets other bits than
in training. npu-ops replaces `linear`, `matmul` with a 2-D second operand, and `conv3d` where it
embeds image patches. PyTorch still computes:
- the gradients of these operators;
- `mm` and `bmm`;
- calls with mixed dtypes, or with a dtype other than fp32, bf16 and fp16.
"""

from __future__ import annotations

import torch

from npu_ops.ops.linear import formats
from npu_ops.ops.linear import linear as product

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x, weight, bias=None):
    if not _ours(x, weight) or (bias is not None and bias.dtype != x.dtype):
        return torch.ops.aten.linear.default.decompose(x, weight, bias)
    return product(x, with_rows("weight", weight), bias)


def matmul(x, other):
    if not _ours(x, other) or x.shape[-1] != other.shape[0]:
        return torch.ops.aten.matmul.default.decompose(x, other)
    return product(with_rows("x", x), with_rows("other", other).t())


def conv3d(x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    fills_it = x.dim() == weight.dim() == 5 and x.shape[1:] == weight.shape[1:]
    plain = not any(padding) and set(dilation) == {1} and groups == 1
    if not (fills_it and plain and _ours(x, weight, dims=5)):
        return torch.ops.aten.conv3d.default.decompose(
            x, weight, bias, stride, padding, dilation, groups
        )
    patches = x.reshape(x.shape[0], -1)
    return linear(patches, weight.reshape(weight.shape[0], -1), bias)[..., None, None, None]


def _ours(x, matrix, dims: int = 2) -> bool:
    plain = x.layout is matrix.layout is torch.strided and x.device == matrix.device
    return plain and x.dim() > 0 and matrix.dim() == dims and x.dtype is matrix.dtype in _DTYPES


def with_rows(name, x):
    """Return `x` if it is in ND format, as the kernels need.

    Raises:
        ValueError: `x` has a private format of the vendor, e.g. FRACTAL_NZ.
    """
    if why := formats.format_why_not(x):
        raise ValueError(
            f"{name}: got {why}, needs format ND with NPU_OPS_CONSISTENT: set "
            "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT=1 (SGLang) or VLLM_ASCEND_ENABLE_NZ=0 (vLLM)"
        )
    return x


OPERATORS = {function.__name__: function for function in (linear, matmul, conv3d)}
