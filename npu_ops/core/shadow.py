"""NPU_OPS_LOG=shadow:N: compare every Nth call of an op with its reference.

Such a call also runs the reference, holds three copies of its arguments, and waits for the device.
On a mismatch the call is written to a file, which `npu-ops replay` can compute again on any
machine.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from npu_ops.core import env, log
from npu_ops.core.compare import error_ratio
from npu_ops.core.hardware import is_captured

# Largest error ratio (RMS of error over RMS of reference), by the call's coarsest dtype. Rounding
# stays below it; a wrong kernel is far above it.
LARGEST_RATIO = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
MOST_FILES = 10  # per process: each file is as large as the op's arguments

# A file may come from an untrusted source: it may hold only these types, tensors, tuples and lists.
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_DTYPES = frozenset(
    {
        *LARGEST_RATIO, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip
_keeps: dict[str, type] = {}

_calls: collections.Counter[str] = collections.Counter()
_written = itertools.count(1)


def due(op: str) -> bool:
    """Count a call of an op, and return whether to compare it."""
    _calls[op] += 1
    return _calls[op] % env.settings.shadow == 0


def run(table, chosen, args: tuple) -> None:
    """Run `args` with `chosen`, compare its outputs with the reference, and log the result."""
    reference = table.implementations[-1]
    if chosen.name == reference.name or is_captured(args[0].device):
        chosen.launcher(*args)
        return
    with torch.no_grad():
        before = freeze(args)
        chosen.launcher(*args)
        errors = compare(reference.launcher, before, args)
    sentence = f"{table.op}: {chosen.name} against reference: {shown(errors)}"
    if all(ratio <= most for ratio, most in errors.values()):
        log.trace(f"shadow: {sentence}")
        return
    path = _write(table.op, chosen.name, before)
    repeat = f"repeat: npu-ops replay {path}"
    if path is None:
        repeat = f"no file written, because this process wrote {MOST_FILES} already"
    log.logger.error("shadow: WRONG: %s; %s", sentence, repeat)


def compare(reference: Callable, before: dict, args: tuple) -> dict[str, tuple[float, float]]:
    """Return the error ratio and its limit for each tensor that was written.

    before: the frozen arguments of the call. args: the arguments after the call.
    """
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
    """Format the errors as one line."""
    return ", ".join(f"{name} {ratio:.2g}" for name, (ratio, _) in errors.items()) or "no output"


def freeze(args: tuple) -> dict:
    """Copy a call's arguments: their memory as bytes, and each tensor's place and strides in it."""
    storages, places = [], {}
    frozen = _frozen(args, storages, places)
    return {"args": frozen, "storages": storages}


def thaw(frozen: dict, device: str | None = None) -> tuple:
    """Rebuild the arguments in new memory; tensors that shared memory share it again.

    `frozen` may be untrusted: it can only name classes that are registered with `keep`.

    Raises:
        ValueError: `frozen` does not come from `freeze`, or a tensor reaches beyond its memory.
    """
    storages = _part(frozen, "storages", list)
    storages = [_storage(bytes_, device) for bytes_ in storages]
    return tuple(_thawed(item, storages) for item in _part(frozen.get("args"), "tuple", list))


def keep(named_tuple: type) -> type:
    """Register a NamedTuple type of an implementation's argument for `freeze` and `thaw`.

    Use it as a class decorator.
    """
    if _keeps.setdefault(named_tuple.__name__, named_tuple) is not named_tuple:
        raise ValueError(f"two named tuples are called {named_tuple.__name__}")
    return named_tuple


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
    if isinstance(value, (tuple, list)):
        items = [_frozen(item, storages, places) for item in value]
        if type(value) in _keeps.values():
            return {"named": [type(value).__name__, items]}
        if not hasattr(value, "_fields"):
            return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"shadow: got an argument of {type(value)}, needs a type that a file can store")


def _thawed(value: Any, storages: list) -> Any:
    if isinstance(value, _PLAIN):
        return value
    kind = next(iter(value), None) if isinstance(value, dict) and len(value) == 1 else None
    content = _part(value, kind, list)
    if kind == "tensor":
        return _placed(content, storages)
    if kind == "named":
        name, items = _parts("a named tuple", content, str, list)
        if name not in _keeps or len(items) != len(_keeps[name]._fields):
            raise _wrong(
                f"{name!r} of {len(items)}", f"one of {', '.join(_keeps)}, with its fields"
            )
        return _keeps[name](*(_thawed(item, storages) for item in items))
    if kind not in ("tuple", "list"):
        raise _wrong(repr(kind), "tensor, named, tuple or list")
    items = [_thawed(item, storages) for item in content]
    return items if kind == "list" else tuple(items)


def _storage(bytes_: Any, device: str | None) -> torch.UntypedStorage:
    """Return a new storage with these bytes."""
    if (
        type(bytes_) is not torch.Tensor
        or (bytes_.dtype, bytes_.layout, bytes_.dim()) != (torch.uint8, torch.strided, 1)
        or bytes_.is_meta
        or not bytes_.is_contiguous()
    ):
        raise _wrong("a storage of another type", "contiguous bytes")
    return (bytes_.to(device) if device else bytes_).clone().untyped_storage()


def _placed(content: list, storages: list) -> torch.Tensor:
    """Return a tensor in its storage, after a check: torch would enlarge a storage too small."""
    kinds = (int, torch.dtype, int, tuple, tuple)
    number, dtype, offset, shape, strides = _parts("a tensor", content, *kinds)
    numbers = (number, offset, *shape, *strides)
    if (
        dtype not in _DTYPES
        or len(shape) != len(strides)
        or not all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        or number >= len(storages)
    ):
        raise _wrong(f"a tensor {content!r}", f"a place in one of {len(storages)} storages")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    needed = (last + 1) * dtype.itemsize if all(shape) else 0
    storage = storages[number]
    if needed > storage.nbytes():
        raise _wrong(f"a tensor of {needed} bytes", f"at most its storage's {storage.nbytes()}")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def _part(value: Any, key: Any, kind: type) -> Any:
    """Return an entry of an untrusted dict, checked for its type."""
    if not isinstance(value, dict) or not isinstance(value.get(key), kind):
        raise _wrong(type(value).__name__, f"a dict with a {kind.__name__} {key!r}")
    return value[key]


def _parts(what: str, content: list, *kinds: type) -> list:
    """Return an untrusted list if it holds one item of each kind."""
    pairs = zip(content, kinds, strict=False)
    if len(content) != len(kinds) or not all(isinstance(x, kind) for x, kind in pairs):
        raise _wrong(f"{what} {content!r}", f"[{', '.join(kind.__name__ for kind in kinds)}]")
    return content


def _wrong(got: str, needs: str) -> ValueError:
    return ValueError(f"file: got {got}, needs {needs}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _names(function: Callable, args: tuple) -> list[str]:
    """Return names for the tensors in `args`, from the function's signature if it has one."""
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
    """Return whether two tensors are bitwise equal, NaN included: unwritten memory may hold NaN."""
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error ratio; infinities and NaNs in both count as equal."""
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
