"""NPU_OPS_LOG=shadow:N: every Nth call of an op is computed by its reference too, and compared.

It takes as long as the reference does and three times the memory, and it waits for the device. What
differs is written to a file that `npu-ops replay` computes again, anywhere.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from npu_ops.core import env, log
from npu_ops.core.compare import error_ratio

# RMS of the error over RMS of the reference, by the coarsest dtype of the call: beyond what
# rounding explains, far below what a wrong kernel makes.
LARGEST_RATIO = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
MOST_FILES = 10  # of one process: they are as large as what the ops were called with

_calls: collections.Counter[str] = collections.Counter()
_written = itertools.count(1)


def due(op: str) -> bool:
    """Whether this call of an op is one to compare."""
    _calls[op] += 1
    return _calls[op] % env.settings.shadow == 0


def run(table, chosen, args: tuple) -> None:
    """Run `args` by `chosen` as always; compare with the reference what it wrote, and log it."""
    reference = table.implementations[-1]
    if chosen.name == reference.name or _is_captured(args[0].device):
        chosen.launcher(*args)
        return
    with torch.no_grad():
        before = freeze(args)
        chosen.launcher(*args)
        errors = compare(reference.launcher, before, args)
    sentence = f"{table.op}: {chosen.name} against reference: {shown(errors)}"
    if all(ratio <= most for ratio, most in errors.values()):
        log.logger.warning("shadow: %s", sentence)
        return
    path = _write(table.op, chosen.name, before)
    repeat = f"repeat: npu-ops replay {path}" if path else f"{MOST_FILES} files are written already"
    log.logger.error("shadow: WRONG: %s; %s", sentence, repeat)


def compare(reference: Callable, before: dict, args: tuple) -> dict[str, tuple[float, float]]:
    """For each tensor that was written: its error ratio, and the largest that passes."""
    expected = thaw(before)
    reference(*expected)
    untouched = thaw(before)
    most = LARGEST_RATIO[_coarsest(args)]
    names = _names(reference, args)
    errors = {}
    for name, was, wrong, right in zip(
        names, *map(_tensors, (untouched, args, expected)), strict=True
    ):
        if not (_same(was, right) and _same(was, wrong)):
            errors[name] = (_ratio(wrong, right), most)
    return errors


def shown(errors: dict[str, tuple[float, float]]) -> str:
    """The errors as one line."""
    return ", ".join(f"{name} {ratio:.2g}" for name, (ratio, _) in errors.items()) or "no output"


def freeze(args: tuple) -> dict:
    """A copy of a call's arguments: memory as bytes, and how the tensors lie in it."""
    storages, places = [], {}
    frozen = _frozen(args, storages, places)
    return {"args": frozen, "storages": storages}


def thaw(frozen: dict, device: str | None = None) -> tuple:
    """The arguments again, in new memory; tensors that shared memory share it."""
    storages = [
        (bytes_.to(device) if device else bytes_).clone().untyped_storage()
        for bytes_ in frozen["storages"]
    ]
    return _thawed(frozen["args"], storages)


def _frozen(value: Any, storages: list, places: dict) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        key = (str(value.device), storage.data_ptr(), storage.nbytes())
        if key not in places or not storage.nbytes():
            places[key] = len(storages)
            empty = torch.empty(0, dtype=torch.uint8, device=value.device)
            storages.append(empty.set_(storage).clone())
        layout = [places[key], value.dtype, value.storage_offset(), value.shape, value.stride()]
        return {"tensor": layout}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_frozen(item, storages, places) for item in value]
        return {"named": [type(value).__module__, type(value).__qualname__, items]}
    if isinstance(value, (tuple, list)):
        items = [_frozen(item, storages, places) for item in value]
        return {type(value).__name__: items}
    return value


def _thawed(value: Any, storages: list) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        number, dtype, *layout = content
        storage = storages[number]
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)
    if kind == "named":
        module, name, items = content
        if not module.startswith("npu_ops."):
            raise ValueError(f"file: got the class {module}.{name}, needs one of npu_ops")
        return getattr(importlib.import_module(module), name)(
            *(_thawed(item, storages) for item in items)
        )
    items = [_thawed(item, storages) for item in content]
    return items if kind == "list" else tuple(items)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _is_captured(device: torch.device) -> bool:
    """Whether a graph is being captured, which nothing may wait in."""
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def _names(function: Callable, args: tuple) -> list[str]:
    """What the tensors are called, as far as the function says."""
    try:
        bound = inspect.signature(function).bind(*args).arguments
    except (TypeError, ValueError):
        bound = {"": args}
    names = []
    for name, value in bound.items():
        fields = getattr(value, "_fields", None) or itertools.count(1)
        many = isinstance(value, (tuple, list))
        for label, item in zip(fields, value if many else (value,), strict=False):
            here = f"{name} {label}".strip() if many else name
            count = len(list(_tensors(item)))
            names += [here] if count == 1 else [f"{here} {n}" for n in range(1, count + 1)]
    return names


def _coarsest(args: tuple) -> torch.dtype:
    dtypes = {x.dtype for x in _tensors(args)} & LARGEST_RATIO.keys()
    return max(dtypes, key=LARGEST_RATIO.__getitem__, default=torch.float32)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: what was never written may be NaN."""
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error ratio; what is infinite or NaN in both is equal."""
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else float("inf")
    alike = (actual == expected) | (actual.isnan() & expected.isnan())
    finite = expected.masked_fill(~expected.isfinite(), 0)
    return error_ratio(torch.where(alike, finite, actual), torch.where(alike, finite, expected))


def _write(op: str, implementation: str, frozen: dict) -> str | None:
    number = next(_written)
    if number > MOST_FILES:
        return None
    path = os.path.abspath(f"npu-ops-mismatch-{op}-{os.getpid()}-{number}.pt")
    device = str(frozen["storages"][0].device)
    storages = [bytes_.cpu() for bytes_ in frozen["storages"]]
    torch.save(
        {"op": op, "implementation": implementation, "device": device}
        | {"args": frozen["args"], "storages": storages},
        path,
    )
    return path
