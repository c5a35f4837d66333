"""Finds the models whose modules are patched. Each has its own copies of all functions.

Models with linear attention are recognized by the functions they define, so a new model needs no
release of npu-ops: `equivalence` compares its functions. Other models are listed by name.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable, Iterable

import npu_ops_import_hook

from npu_ops_adapters.calls import falling_through
from npu_ops_adapters.patching import Names, Patch, parameters
from npu_ops_adapters.transformers import equivalence
from npu_ops_adapters.transformers.equivalence import Variant

TEXT = ("qwen2", "qwen3", "qwen3_moe")
QWEN2_VL = ("qwen2_vl", "qwen2_5_vl")
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
VISION = (*QWEN2_VL, *QWEN3_VL)
BY_NAME = (*TEXT, *VISION)
# In these models all patched functions match npu-ops in every known version. Functions of other
# models may differ.
_OURS = (*BY_NAME, "qwen3_next", "qwen3_5", "qwen3_5_moe")

# A model with linear attention defines one of these functions itself: the name is neither None nor
# imported from another package.
CONVOLUTION = "causal_conv1d_fn"
RULE = "torch_chunk_gated_delta_rule"
RULE_BY_CHANNEL = "chunk_kimi_delta_attention"
_PARTS = (CONVOLUTION, RULE, RULE_BY_CHANNEL)

VERSIONS = "transformers 4.57, 5.10 and 5.23"
WHY = "it launches several kernels, and each reads and writes all elements"


def replaced(
    models: Names, name: str, op: str, ours: Callable, *signatures: Names | None
) -> Iterable[Patch]:
    """Yield a patch of `name` in each model's module.

    ours: takes the function's arguments and returns a function that computes the result, or raises
    TypeError or ValueError for an unsupported call.
    signatures: parameter names in all known versions of transformers; the default is those of
    `ours`.
    """
    for model in models:
        make = functools.partial(falling_through, ours, op=op)
        yield patch(f"{home(model)}:{name}", op, make, signatures or (parameters(ours),))


def compared(
    models: Names, name: str, op: str, variants: tuple[Variant, ...], *signatures: Names | None,
    trusted: tuple[Names | None, ...] = (), instead_of_none: Callable | None = None,
) -> Iterable[Patch]:  # fmt: skip
    """Yield a patch of `name` in each model that has it.

    The patch is refused unless the model's function computes what one of the variants computes.

    trusted: signatures of functions that cannot be called here: None, or other packages' kernels.
    instead_of_none: runs the unsupported calls if `name` is None.
    """
    signatures = (*(signatures or (parameters(variants[0].ours),)), *trusted)
    for model in having(models, name):
        target = f"{home(model)}:{name}"
        yield _compared(target, op, variants, signatures, trusted, instead_of_none)


def compared_classes(
    models: Names,
    which: str | Callable[[type], bool],
    op: str,
    variants: tuple[Variant, ...],
    *signatures: Names,
) -> Iterable[Patch]:
    """Like `compared`, but for the `forward` of each model class that `classes` finds."""
    for model in models:
        for name in classes(model, which):
            target = f"{home(model)}:{name}.forward"
            cls = vars(sys.modules[home(model)])[name]
            yield _compared(target, op, variants, signatures, cls=cls)


def classes(model: str, which: str | Callable[[type], bool]) -> Names:
    """Return the names of classes that an imported model defines.

    which: the end of a name, or a function that tells whether a class belongs to the result.
    """
    return tuple(
        name
        for name, value in vars(sys.modules[home(model)]).items()
        if isinstance(value, type) and value.__module__ == home(model)
        if (name.endswith(which) if isinstance(which, str) else which(value))
    )


def _compared(
    target, op, variants, signatures, trusted=(), instead_of_none=None, cls=None
) -> Patch:
    def chosen(original) -> Variant | str:
        if parameters(original) in trusted:
            return variants[0]
        return equivalence.choose(cls or equivalence.innermost(original), variants)

    def why_not(original) -> str | None:
        found = chosen(original)
        return found if isinstance(found, str) else None

    def make(original) -> Callable:
        theirs = instead_of_none if original is None else original
        return falling_through(chosen(original).on(cls), theirs, op=op)

    return patch(target, op, make, signatures, why_not=why_not)


def patch(target: str, op: str, make: Callable, signatures, **changes) -> Patch:
    """Make a patch with the fields that all patches here share."""
    settings = {
        "why": WHY,
        "remove_when": "transformers calls an operator here that has an NPU kernel",
        "may_differ": all(home(model) != target.partition(":")[0] for model in _OURS),
    }
    return Patch(
        target=target,
        op=op,
        make=make,
        signatures=signatures,
        versions=VERSIONS,
        **(settings | changes),
    )


def home(model: str) -> str:
    """Return the module of a model."""
    return f"transformers.models.{model}.modeling_{model}"


def having(models: Names, name: str) -> Names:
    """Return the models that are imported and have `name`, which some versions lack."""
    return tuple(model for model in models if name in vars(sys.modules.get(home(model), object)))


def imported(models: Names) -> Names:
    """Return the models among these that are imported, each once."""
    return tuple(model for model in dict.fromkeys(models) if home(model) in sys.modules)


def linear() -> Names:
    """Return imported models with linear attention: each defines one of the functions `_PARTS`."""
    models = filter(None, map(npu_ops_import_hook.model_of_transformers, list(sys.modules)))
    return tuple(model for model in models if any(_defines(model, name) for name in _PARTS))


def _defines(model: str, name: str) -> bool:
    """Return whether the model itself defines `name`, instead of importing it or setting None."""
    function = equivalence.innermost(vars(sys.modules[home(model)]).get(name))
    return getattr(function, "__module__", None) == home(model)


def vision() -> Names:
    """Return the models with a vision tower.

    These are the models in VISION, and each imported model with linear attention and a tower.
    """
    return (*VISION, *having(linear(), "apply_rotary_pos_emb_vision"))


def modules() -> list[str]:
    """Return the modules of installed models that are patched.

    These are the models listed by name, and those whose source defines RULE or RULE_BY_CHANNEL.
    """
    package = importlib.util.find_spec("transformers")
    roots = package and package.submodule_search_locations or ()
    defined = re.compile(rf"^def ({RULE}|{RULE_BY_CHANNEL})\(", re.MULTILINE)
    found = [
        path.parent.name
        for root in roots
        for path in sorted(pathlib.Path(root).glob("models/*/modeling_*.py"))
        if path.stem == f"modeling_{path.parent.name}" and defined.search(path.read_text("utf-8"))
    ]
    return [home(model) for model in (*BY_NAME, *found)]
