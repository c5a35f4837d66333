"""Passes the experts' process groups when MindSpeed core_r0.12 saves and loads experts.

This version saves and loads experts with the tensor-parallel group of attention. But experts have
their own group, of `--expert-tensor-parallel-size` ranks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_MODULE = "mindspeed.te.pytorch.module.grouped_linear"
_NAME = "make_sharded_tensors_for_checkpoint"


def patches() -> Iterable[Patch]:
    """Patch the function that creates experts' sharded tensors, if its callers pass no tp_group."""
    if _passes_no_group(sys.modules.get(_MODULE)):
        yield Patch(
            target=f"{_MODULE}:{_NAME}",
            op="mindspeed",
            make=_with_groups,
            why="on several ranks it expects another shape than the checkpoint has, and raises",
            signatures=(
                (
                    *("state_dict", "prefix", "tensor_parallel_layers_axis_map", "sharded_offsets"),
                    *("extra_state_suffix", "tp_group", "dp_cp_group"),
                ),
            ),
            versions=VERSIONS,
            remove_when="MindSpeed core_r0.12 is no longer used: later versions pass the group",
            rebind=False,
        )


@functools.cache
def _passes_no_group(module: ModuleType | None) -> bool:
    """Return whether the module's source never passes tp_group; True if it is not imported."""
    try:
        tree = ast.parse("" if module is None else inspect.getsource(module))
    except (OSError, TypeError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = [call.keywords for call in calls if getattr(call.func, "id", None) == _NAME]
    return all("tp_group" not in {word.arg for word in words} for words in asked)


def _with_groups(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_make_sharded(*args, **kwargs):
        state = sys.modules["megatron.core.parallel_state"]
        if len(args) < 6 and kwargs.get("tp_group") is None:
            kwargs["tp_group"] = state.get_expert_tensor_parallel_group()
            kwargs["dp_cp_group"] = state.get_data_parallel_group(with_context_parallel=True)
        return original(*args, **kwargs)

    return npu_ops_make_sharded
