"""Replaces RMS norms of torch and torch_npu, torch_npu's SwiGLU, and layer norms under autocast.

MindSpeed, vllm-ascend and verl call torch_npu's norms, Megatron calls torch's. All of them now call
`npu_ops.rms_norm`, which rounds once; npu-ops also installs it in transformers and SGLang.
torch_npu's `npu_swiglu` rounds once. A transformers model rounds silu(gate) and then its product
with up, so this replacement rounds twice, too.

verl's FSDP actor computes under autocast, where layer norms of a vision tower would be fp32. They
keep the dtype of their tensors here.
"""

from __future__ import annotations

import torch

from npu_ops.ops import rms_norm as norm


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """Call `npu_ops.rms_norm`.

    PyTorch still computes norms over several dimensions, in float64, with eps=None, without a
    weight or with a weight of another dtype.
    """
    plain = weight is not None and weight.dtype is input.dtype and eps is not None
    if not plain or len(normalized_shape) != 1 or input.dtype is torch.float64:
        return torch.ops.aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
    return norm.rms_norm(input, weight, eps)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """Compute in the dtype of the tensors, as a server without autocast does.

    Under autocast PyTorch would compute in fp32. If the dtypes of the tensors differ, this function
    computes in fp32, too.
    """
    given = input, weight, bias
    with torch.autocast(input.device.type, enabled=False):
        if len({x.dtype for x in given if x is not None}) > 1:
            given = [None if x is None else x.float() for x in given]
        return torch.layer_norm(given[0], normalized_shape, given[1], given[2], eps)


def npu_rms_norm(input, gamma, epsilon=1e-6):
    return norm.rms_norm(input, gamma, epsilon), _rstd(input, epsilon)


def npu_gemma_rms_norm(input, gamma, epsilon=1e-6):
    return norm.rms_norm(input, gamma, epsilon, zero_centered=True), _rstd(input, epsilon)


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    out, total = norm.add_rms_norm(x1, x2, gamma, epsilon)
    return out, _rstd(total, epsilon), total


def npu_swiglu(input, dim=-1):
    if input.shape[dim] % 2:
        raise ValueError(f"input: got {list(input.shape)}, needs an even dimension {dim}")
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


@torch.no_grad()
def _rstd(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return 1 / RMS of x, fp32 `[..., 1]`: torch_npu's norms return it for their backward."""
    return x.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()


OPERATORS = {"rms_norm": rms_norm}
OPERATORS_UNDER_AUTOCAST = {"layer_norm": layer_norm}
OPERATORS_OF_TORCH_NPU = {
    function.__name__: function
    for function in (npu_rms_norm, npu_gemma_rms_norm, npu_add_rms_norm, npu_swiglu)
}
