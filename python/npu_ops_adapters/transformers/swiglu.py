"""Replaces SwiGLU in MLPs and in the experts of a mixture.

An MLP projects gate and up in two calls, so they are two tensors. With NPU_OPS_CONSISTENT the
models' own functions run. They round silu(gate), as all frameworks do in that mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, env
from npu_ops_adapters.calls import check_device, falling_through
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant, innermost

_OF_EXPERTS = "_default_apply_gate"  # of transformers.integrations.moe, from version 5 on
_WHY = "it launches two kernels, four in backward, and keeps silu(gate) for backward"
_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SIGNATURES = ("self", "x"), ("self", "hidden_state"), ("self", "hidden_states")


def patches() -> Iterable[Patch]:
    """Patch `forward` of each class that uses only `_PARTS`, and `_apply_gate` of experts."""
    known = models.imported((*models.BY_NAME, *models.linear()))
    variant = Variant(ours, _calls, _small_mlp)
    yield from models.compared_classes(known, _is_mlp, "swiglu", (variant,), *_SIGNATURES)
    make = functools.partial(falling_through, ours_of_experts, op="swiglu")
    for model in known:
        for name in models.classes(model, _has_gate_of_experts):
            target = f"{models.home(model)}:{name}._apply_gate"
            # A decorator of transformers gives all classes the same function. Patch each class, not
            # that function: classes made later would get the replacement, and keep it after a
            # revert.
            yield models.patch(
                target, "swiglu", make, (("self", "gate_up_out"),), why=_WHY, rebind=False
            )


def _is_mlp(cls: type) -> bool:
    code = getattr(innermost(vars(cls).get("forward")), "__code__", None)
    return code is not None and _PARTS == set(code.co_names)


def _has_gate_of_experts(cls: type) -> bool:
    return getattr(innermost(vars(cls).get("_apply_gate")), "__name__", "") == _OF_EXPERTS


def _small_mlp(cls: type, factor: int) -> torch.nn.Module:
    """Make a module of a model's class with just `_PARTS`, without calling its `__init__`."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    wide, narrow = 8 * factor, 4 * factor
    module.gate_proj = torch.nn.Linear(narrow, wide)
    module.up_proj = torch.nn.Linear(narrow, wide)
    module.down_proj = torch.nn.Linear(wide, narrow)
    module.act_fn = torch.nn.SiLU()
    return Draw().fill(module)


def _calls(cls: type) -> list[tuple]:
    x = Draw().normal(2, 3, 4)
    return [(_small_mlp(cls, 1), x), (_small_mlp(cls, 1).bfloat16(), x.bfloat16())]


def ours(module, x) -> Callable:
    """Return the npu-ops call for this call of transformers.

    npu-ops rounds the result once, transformers twice.
    """
    _check(module.act_fn, "x", x)
    return functools.partial(_project, module, x)


def _project(module, x):
    gate, up = module.gate_proj(x), module.up_proj(x)
    if _takes(gate) and _takes(up) and (gate.shape, gate.dtype) == (up.shape, up.dtype):
        return module.down_proj(npu_ops.swiglu(gate, up))
    return module.down_proj(module.act_fn(gate) * up)


def ours_of_experts(module, gate_up_out) -> Callable:
    """Return the npu-ops call for experts, whose one projection gives gate and up side by side."""
    _check(module.act_fn, "gate_up_out", gate_up_out)
    if not _takes(gate_up_out) or gate_up_out.shape[-1] % 2:
        raise ValueError("gate_up_out: got a tensor that no npu-ops kernel supports")
    return functools.partial(npu_ops.swiglu, gate_up_out)


def _check(activation, name: str, x) -> None:
    """Raise TypeError or ValueError unless x is a tensor on a supported device and goes to SiLU.

    The activation may have no hooks. With NPU_OPS_CONSISTENT every call is refused.
    """
    check.tensor(name, x)
    check_device(x)
    if env.settings.consistent:
        raise ValueError("NPU_OPS_CONSISTENT also rounds silu(gate), npu-ops' kernel does not")
    if activation is not torch.nn.functional.silu:
        check.one_of("act_fn", type(activation).__name__, ("SiLU", "SiLUActivation"))
        if activation._forward_hooks or activation._forward_pre_hooks:
            raise ValueError("act_fn: got a module with hooks, which npu-ops would not call")


def _takes(x: torch.Tensor) -> bool:
    """Return whether a projection gave a plain tensor in a dtype of npu-ops' kernels.

    A subclass such as DTensor, which is spread over ranks, has operators of its own.
    """
    return type(x) is torch.Tensor and x.dtype in check.KERNEL_DTYPES
