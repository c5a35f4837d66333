"""GemmaRMSNorm of Qwen3-Next and Qwen3.5, which multiplies by 1 + weight.

vllm-ascend computes 1 + weight in the weight's dtype. In bf16 that rounds the sum, so the server's
norm differs from the trainer's.

Plain RMSNorm is patched only with NPU_OPS_CONSISTENT. It calls torch_npu's fused operator, which
`npu_ops.consistent` replaces, or with a residual vllm-ascend's own operator, which this file
replaces.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, refuse
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Patch `AscendGemmaRMSNorm.forward_oot`, which is vLLM's GemmaRMSNorm on NPUs."""
    yield functions.replaced(
        "vllm_ascend.ops.layernorm:AscendGemmaRMSNorm.forward_oot",
        "rms_norm",
        ours,
        "1 + weight is rounded, which it is not in training",
    )
    if env.settings.consistent:
        target = "vllm_ascend.ops.layernorm:AscendRMSNorm.forward_oot"
        patch = functions.replaced(
            target,
            "rms_norm",
            added,
            "behind a sum it has other roundings than training",
        )
        yield dataclasses.replace(patch, make=functools.partial(_made, target))


def _made(target: str, original: Callable) -> Callable:
    """Return a `forward` that runs `added` with a residual, and vllm-ascend's `forward` without.

    Without a residual, vllm-ascend's calls an operator that `npu_ops.consistent` replaces.
    """
    ours_behind_a_sum = functions.made(added, target, original)

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_forward(self, x, residual=None):
        return original(self, x) if residual is None else ours_behind_a_sum(self, x, residual)

    return npu_ops_forward


def added(self, x, residual=None):
    """Add x and residual; return the norm of the sum, and the sum."""
    check_device(x)
    refuse(bias=self.bias)
    residual = torch.ops.vllm.maybe_chunk_residual(x, residual)
    return npu_ops.add_rms_norm(x, residual, self.weight, eps=self.variance_epsilon)


def ours(self, x, residual=None):
    """Return the norm of x; with a residual, the norm of the sum, and the sum.

    With sequence parallelism, `maybe_chunk_residual` returns this rank's part of the residual.
    """
    check_device(x)
    settings = {"eps": self.variance_epsilon, "zero_centered": True}
    if residual is None:
        return npu_ops.rms_norm(x, self.weight, **settings)
    residual = torch.ops.vllm.maybe_chunk_residual(x, residual)
    return npu_ops.add_rms_norm(x, residual, self.weight, **settings)
