"""GemmaRMSNorm of Qwen3-Next and Qwen3.5, which multiplies by 1 + weight.

vllm-ascend computes 1 + weight in the weight's dtype. In bf16 that rounds the sum, so the server's
norm differs from the trainer's. Plain RMSNorm stays with torch_npu's fused operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """`AscendGemmaRMSNorm.forward_oot`, which is vLLM's GemmaRMSNorm on NPUs."""
    yield functions.replaced(
        "vllm_ascend.ops.layernorm:AscendGemmaRMSNorm.forward_oot",
        "rms_norm",
        ours,
        "1 + weight is rounded, which it is not in training",
    )


def ours(self, x, residual=None):
    """With a residual, return the norm and the sum.

    `maybe_chunk_residual` takes this rank's part of the residual under sequence parallelism.
    """
    check_device(x)
    settings = {"eps": self.variance_epsilon, "zero_centered": True}
    if residual is None:
        return npu_ops.rms_norm(x, self.weight, **settings)
    residual = torch.ops.vllm.maybe_chunk_residual(x, residual)
    return npu_ops.add_rms_norm(x, residual, self.weight, **settings)
