"""Count the calls that reach npu_ops; the adapters look up its operators at each call."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType

import torch

TORCH_NPU = (
    "npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention", "npu_grouped_matmul",
    "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_cross_entropy_loss",
)  # fmt: skip

# The operators of a layer of Gated Delta Net.
DELTA_NET = (
    "causal_conv1d", "causal_conv1d_update", "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule", "gdn_gate", "l2norm", "rms_norm_gated",
)  # fmt: skip


def on_calls(
    names: Iterable[str], note: Callable[[str], None], home: ModuleType | None = None
) -> None:
    """Call `note(name)` before each later call of these operators of npu_ops, or of `home`.

    Calls that torch.compile traces are not noted. On a machine with an NPU, calls on CPU tensors
    are not noted: `equivalence` makes them to compare a model's functions with npu-ops'.
    """
    if home is None:
        import npu_ops as home  # not at the top: checks depend on the import order
    for name in names:
        setattr(home, name, _noted(getattr(home, name), functools.partial(note, name)))


def count_calls(names: Iterable[str]) -> collections.Counter[str]:
    """Count the later calls of each operator, in the counter that is returned."""
    calls = collections.Counter()
    on_calls(names, lambda name: calls.update([name]))
    return calls


def _noted(operator: Callable, note: Callable[[], None]) -> Callable:
    @functools.wraps(operator)
    def call(*args, **kwargs):
        # Inside a compiled graph the count would become a guard, and each change would recompile.
        if not torch.compiler.is_compiling() and not _compares([*args, *kwargs.values()]):
            note()
        return operator(*args, **kwargs)

    return call


def _compares(values: list) -> bool:
    on_cpu = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in values[:2])
    return on_cpu and hasattr(torch, "npu") and torch.npu.is_available()


def operators() -> list[str]:
    """Return the names of npu_ops's functions that compute."""
    import npu_ops

    asked = ("build_info", "explain", "is_npu", "plan_attention", "unfinished_rows")
    public = [name for name in npu_ops.__all__ if name not in asked]
    return [name for name in public if inspect.isfunction(getattr(npu_ops, name))]
