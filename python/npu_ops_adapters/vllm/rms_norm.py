"""RMSNorm of weights that are beside 1: of Qwen3-Next and Qwen3.5.

vllm-ascend adds 1 to the weight in its own dtype, so bf16 rounds the sum, and the server's norm is
not the trainer's. Of other weights torch_npu's operator is one launch, and is left in place.
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
        ("self", "x", "residual"),
    )


def ours(self, x, residual=None):
    """Beside a residual also the sum. Ranks of sequence parallelism have a part of the residual."""
    check_device(x)
    settings = {"eps": self.variance_epsilon, "zero_centered": True}
    if residual is None:
        return npu_ops.rms_norm(x, self.weight, **settings)
    residual = torch.ops.vllm.maybe_chunk_residual(x, residual)
    return npu_ops.add_rms_norm(x, residual, self.weight, **settings)
