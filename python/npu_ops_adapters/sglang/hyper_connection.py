"""Selects PyTorch functions to mix and combine Qwen4-Exp's streams of hidden states.

SGLang compiles these functions, so they round once; training rounds after each operator. In SGLang
torch_npu's `transfer_to_npu` makes `Tensor.is_cuda` True on NPUs, so SGLang chooses CUDA kernels.
`rms_norm` patches the norm of the streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_HOME = "sglang.srt.layers.hyperconnection"


def patches() -> Iterable[Patch]:
    """Patch the code that chooses a kernel, from SGLang 0.5.23 on.
    On CPUs patch it only with NPU_OPS_CONSISTENT.
    """
    if not functions.since("0.5.23") or not (functions.on_npu() or env.settings.consistent):
        return
    yield Patch(
        target=f"{_HOME}:GatedResidual.__init__", op="linear", make=with_plain_functions,
        why="it chooses a kernel for CUDA, and compiled functions round once",
        signatures=(("self", "config", "use_mix", "use_combine", "role"),),
        versions="SGLang 0.5.23", remove_when="SGLang has these functions for NPUs",
        by=functions.hooks.who_applies(),
    )  # fmt: skip
    target = f"{_HOME}:fused_hc_mix_supported"
    yield functions.replaced(target, "linear", not_fused, "the kernel is for CUDA")


def with_plain_functions(original: Callable) -> Callable:
    """Wrap `__init__` to choose PyTorch functions, with NPU_OPS_CONSISTENT uncompiled ones."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._jit_combine_ok = False
        for name in ("_mix_compute", "_combine_compute") if env.settings.consistent else ():
            compiled = getattr(self, name)
            setattr(self, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))

    return __init__


def not_fused(hyper_input_normed, w_down, w_up):
    """Return False: no fused kernel supports the call."""
    functions.check_device(hyper_input_normed)
    return False
