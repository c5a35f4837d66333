"""Computes verl's log-probabilities in fp32, as servers do.

On NPUs verl calls torch_npu's cross entropy, whose result has the dtype of the logits: with an FSDP
actor in bf16 a log-probability of -5 is off by up to 0.016. With NPU_OPS_CONSISTENT npu-ops uses
log_softmax on every device, and divides logits by the temperature in fp32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

from npu_ops.core import env
from npu_ops_adapters.log_probs import log_probs
from npu_ops_adapters.patching import Patch

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_SCALE = "_scale_logits_by_temperature"


def patches() -> Iterable[Patch]:
    """Patch the function of FSDP's engines; with NPU_OPS_CONSISTENT also the division."""
    yield Patch(
        target="verl.utils.torch_functional:logprobs_from_logits",
        op="verl_log_probs",
        make=_replace,
        why="on NPUs it rounds log-probabilities to the dtype of the logits",
        signatures=(("logits", "labels", "inplace_backward"),),
        versions="verl 0.9.1",
        remove_when="verl's log-probabilities on NPUs are in fp32",
    )
    engine = sys.modules.get(_ENGINE)  # older verl has no such function
    if env.settings.consistent and (engine is None or hasattr(engine, _SCALE)):
        yield Patch(
            target=f"{_ENGINE}:{_SCALE}",
            op="verl_log_probs",
            make=_scaled_in_fp32,
            why="it divides in the dtype of the logits, an inference server in fp32",
            signatures=(("logits", "temperature", "is_unit_temperature"),),
            versions="verl 0.9.1",
            remove_when="verl divides logits in fp32",
        )


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_logprobs_from_logits(logits, labels, inplace_backward=True):
        rounded = logits.device.type == "npu" and logits.dtype.itemsize < 4
        if rounded or env.settings.consistent:
            return log_probs(logits, labels)
        return original(logits, labels, inplace_backward)

    return npu_ops_logprobs_from_logits


def _scaled_in_fp32(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_scale_logits(logits, temperature, *, is_unit_temperature):
        wide = logits if is_unit_temperature else logits.to(torch.float32)
        return original(wide, temperature, is_unit_temperature=is_unit_temperature)

    return npu_ops_scale_logits
