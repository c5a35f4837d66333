"""Replaces RMSNorm, alone and with a residual, to round as in training.

On NPUs SGLang's `GemmaRMSNorm` rounds 1 + weight to bf16 before it multiplies. On CPUs its
`RMSNorm` does not round the sum before it normalizes. Trainers round the sum and the result,
nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_HOME = "sglang.srt.layers.layernorm"
_GEMMA = ("self", "x", "residual", "post_residual_addition")
_OF_GROUPS = (
    "sglang.srt.layers.hyperconnection:GroupedGemmaRMSNorm.forward",
    "sglang.srt.models.qwen4_exp:Qwen4ExpPLEGroupedNorm.forward",
)
_SIGNATURES = (_GEMMA[:3], _GEMMA, (*_GEMMA, "quant_linear"))


def patches() -> Iterable[Patch]:
    """Patch `forward_npu`, `forward_cpu` and `forward_native`; SGLang compiles the last.

    A norm selects one of them when it is built. From 0.5.23 on, also patch two norms of groups.
    """
    why = "it rounds a sum and 1 + weight differently from training"
    for name, ours in (("RMSNorm", ours_plain), ("GemmaRMSNorm", ours_zero_centered)):
        for way in ("npu", "cpu", "native"):
            target = f"{_HOME}:{name}.forward_{way}"
            yield functions.replaced(target, "rms_norm", ours, why, *_SIGNATURES)
    if functions.since("0.5.23"):
        for target in _OF_GROUPS:
            why = "it launches a dozen kernels, because SGLang's kernel is for CUDA"
            yield functions.replaced(target, "rms_norm", ours_of_groups, why, ("self", "x"))


def ours_plain(module, x, residual=None, post_residual_addition=None, quant_linear=None):
    """Normalize with `weight`. SGLang's own method handles further options of `RMSNorm`."""
    functions.refuse(
        quant_linear=quant_linear,
        variance_size_override=module.variance_size_override,
        cast_x_before_out_mul=module.cast_x_before_out_mul,
        fp32_residual=getattr(module, "fp32_residual", None),
        override_orig_dtype=getattr(module, "override_orig_dtype", None),
    )
    return _norm(module, x, residual, post_residual_addition, False)


def ours_zero_centered(module, x, residual=None, post_residual_addition=None):
    return _norm(module, x, residual, post_residual_addition, True)


def ours_of_groups(module, x):
    """Normalize each group of a row's elements, with its part of 1 + weight (Qwen4-Exp)."""
    functions.check_device(x)
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    norm = functools.partial(npu_ops.rms_norm, eps=eps, zero_centered=True)
    size = module.group_size or x.shape[-1]
    return torch.cat(list(map(norm, x.split(size, -1), module.weight.split(size))), -1)


def _norm(module, x, residual, addition, zero_centered: bool):
    """Normalize x, or with a residual their rounded sum.

    addition: None, or Qwen3-VL's deepstack features. They are added to the rounded sum, as in
    training.
    """
    functions.check_device(x)
    settings = {"eps": module.variance_epsilon, "zero_centered": zero_centered}
    if residual is None:
        return npu_ops.rms_norm(x, module.weight, **settings)
    if addition is not None:
        x, residual = addition, x + residual
    return npu_ops.add_rms_norm(x, residual, module.weight, **settings)
