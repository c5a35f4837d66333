"""Adds a name that Bridge imports for Qwen3-Next, and that earlier versions of Megatron-LM lack.

Without the name, no module of Bridge can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from npu_ops_adapters.patching import Patch

_VARIANT = "experimental_attention_variant"
_MODULE = f"megatron.core.models.gpt.{_VARIANT}_module_specs"
_NAME = f"get_transformer_block_with_{_VARIANT}_spec"


def patches() -> Iterable[Patch]:
    """Add the missing function as a stub. Calling the stub raises an error that names it."""
    if not hasattr(sys.modules.get(_MODULE), _NAME):
        yield Patch(
            target=f"{_MODULE}:{_NAME}",
            op="bridge_missing_names",
            make=_say,
            why="Megatron-Bridge imports this name for every model",
            signatures=(),
            versions="Megatron-Bridge 0.3.1 with the Megatron-LM of slime v0.2.2",
            remove_when="slime's Megatron-LM has this name",
            optional=True,
        )


def _say(_: Any) -> Callable:
    def npu_ops_missing(*args, **kwargs):
        raise NotImplementedError(f"{_MODULE}: this Megatron-LM has no {_NAME}")

    return npu_ops_missing
