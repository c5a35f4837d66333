"""Sums the gradient of Gated Delta Net's norm over tensor-parallel ranks.

Each rank has the whole weight of `out_norm` but only its own heads, so its gradient covers only
these heads. Megatron-LM sums such gradients over ranks for the norms of queries and keys, but for
this norm only with sequence parallelism. Without that sum the ranks' weights silently drift apart,
on GPUs too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from npu_ops.core import hardware, log
from npu_ops_adapters.patching import Patch

_HOME = "megatron.core.distributed.finalize_model_grads"
_NAME = "_allreduce_non_tensor_model_parallel_grads"
# Packages whose GatedDeltaNet splits heads over ranks.
_OWNERS = ("megatron", "mindspeed", "mindspeed_bridge")


def patches() -> Iterable[Patch]:
    """Patch the function that sums gradients over tensor-parallel ranks, on a machine with NPUs."""
    home = sys.modules.get(_HOME)
    if home and not (hasattr(home, _NAME) and hardware.is_npu()):
        return  # no NPU; or Megatron-Core before 0.13, which has no Gated Delta Net
    yield Patch(
        target=f"{_HOME}:{_NAME}",
        op="gdn_gradients",
        make=_with_out_norm,
        why="each rank keeps only the gradients of its own heads, without a warning",
        signatures=(("model", "config", "tp_group"), ("model", "config")),
        versions="Megatron-Core 0.16 to 0.19",
        remove_when="Megatron-Core adds the gradients of out_norm without sequence parallelism",
        rebind=False,
        why_not=_why_not,
    )


def _why_not(_: Callable) -> str | None:
    if "out_norm" in inspect.getsource(sys.modules[_HOME]):
        return "Megatron-LM adds these gradients itself"
    return None


def _with_out_norm(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_allreduce(model, config, *group, **named):
        if not config.sequence_parallel:
            _add([weight for chunk in model for weight in _weights(chunk)], *group, **named)
        return original(model, config, *group, **named)

    return npu_ops_allreduce


def _weights(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the norms' weights whose gradients cover only the rank's own heads."""
    for layer in chunk.modules():
        kind = type(layer)
        if kind.__name__ != "GatedDeltaNet" or kind.__module__.partition(".")[0] not in _OWNERS:
            continue
        weight = getattr(layer.out_norm, "weight", None)
        averaged = getattr(weight, "average_gradients_across_tp_domain", False)
        if getattr(layer, "tp_size", 1) > 1 and weight is not None and not averaged:
            yield weight


def _add(weights: list[torch.nn.Parameter], tp_group=None) -> None:
    gradients = [getattr(weight, "main_grad", None) for weight in weights]
    # Skip DTensors of Megatron's FSDP, which were not tested.
    gradients = [gradient for gradient in gradients if type(gradient) is torch.Tensor]
    if not gradients:
        return
    log.once(
        "Without sequence parallelism Megatron-LM does not add the gradients of Gated Delta Net's"
        " out_norm over ranks. npu-ops adds them; NPU_OPS_DISABLE=gdn_gradients turns this off"
    )
    state = importlib.import_module("megatron.core.parallel_state")
    group = tp_group or state.get_tensor_model_parallel_group()
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(summed, group=group)
    parts = summed.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
