"""Argument checks. Every message has the form "argument: got X, needs Y"."""

from __future__ import annotations

import math
import sys

import torch

from npu_ops.core import library, memory
from npu_ops.core.library import KERNEL_DTYPES

FLOATS = (*KERNEL_DTYPES, torch.float64)
_FLOATS_TEXT = "float32, bfloat16, float16 or float64"


def tensor(name: str, value) -> None:
    """Raise TypeError unless `value` is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else short(value.layout)
        raise TypeError(f"{name}: got a tensor of layout {kind}, needs a dense one")


def optional_tensors(**given) -> None:
    """Raise TypeError unless each argument is a dense tensor or None.

    Call it first: the other checks read the shape, dtype and device of a tensor.
    """
    for name, value in given.items():
        if value is not None:
            tensor(name, value)


def floating(name: str, value: torch.Tensor) -> None:
    """Raise TypeError unless `value` is a tensor of float32, bfloat16, float16 or float64."""
    tensor(name, value)
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: got {short(value.dtype)}, needs {_FLOATS_TEXT}")


def dtype(name: str, value: torch.Tensor, *allowed: torch.dtype, whose: str = "") -> None:
    """Raise TypeError unless `value` has an `allowed` dtype.

    whose: prefix of the dtype in the message, e.g. "x's ".
    """
    if value.dtype not in allowed:
        needs = " or ".join(dict.fromkeys(map(short, allowed)))
        raise TypeError(f"{name}: got {short(value.dtype)}, needs {whose}{needs}")


def same_dtype(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise TypeError unless both tensors have the same dtype."""
    if value.dtype != other.dtype:
        dtype(name, value, other.dtype, whose=f"{other_name}'s ")


def indices(name: str, value) -> None:
    """Raise TypeError unless `value` is a tensor of int32 or int64."""
    tensor(name, value)
    dtype(name, value, torch.int32, torch.int64)


def float_dtype(name: str, value) -> None:
    """Raise TypeError unless `value` is torch.float32, bfloat16, float16 or float64."""
    if value not in FLOATS:
        got = short(value) if isinstance(value, torch.dtype) else repr(value)
        raise TypeError(f"{name}: got {got}, needs {_FLOATS_TEXT}")


def same_device(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless both tensors are on the same device."""
    if value.device != other.device:
        raise ValueError(f"{name}: got device {value.device}, needs {other_name}'s {other.device}")


def one_of(name: str, value, allowed: tuple) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(map(repr, allowed))}")


def alone(name: str, **others) -> None:
    """Raise ValueError unless all `others` are None: they cannot be combined with `name`."""
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"{other}: got a value with {name}, needs None")


def shape(name: str, value: torch.Tensor, needs: str) -> ValueError:
    """Return the error for a tensor of the wrong shape. needs: a phrase for the message."""
    return ValueError(f"{name}: got shape {list(value.shape)}, needs {needs}")


def rows(x, weight) -> None:
    """Raise unless x is a floating tensor `[..., D]` and weight a floating `[D]` on x's device."""
    floating("x", x)
    if x.dim() == 0:
        raise shape("x", x, "at least one dimension")
    floating("weight", weight)
    if weight.shape != x.shape[-1:]:
        raise shape("weight", weight, f"[{x.shape[-1]}], x's last dimension")
    same_device("weight", weight, "x", x)


def like_x(name: str, value, x: torch.Tensor) -> None:
    """Raise unless `value` is a floating tensor of x's shape, on its device."""
    floating(name, value)
    if value.shape != x.shape:
        raise shape(name, value, f"x's shape {list(x.shape)}")
    same_device(name, value, "x", x)


def number(name: str, value, low: float, high: float, needs: str) -> None:
    """Raise ValueError unless `value` is a number in [low, high)."""
    if not isinstance(value, (int, float)) or not low <= value < high:
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}: got {got}, needs {needs}")


def epsilon(name: str, value) -> None:
    """Raise ValueError unless `value` is a finite number that is not negative."""
    number(name, value, 0, math.inf, "a finite number, 0 or more")


def scale(name: str, value) -> None:
    """Raise ValueError unless `value` is None or a finite number."""
    if value is not None:
        number(name, value, -sys.float_info.max, math.inf, "a finite number")


def inplace(written: dict[str, torch.Tensor], read: dict, elementwise: bool = False) -> None:
    """Raise ValueError if a call cannot run in place.

    The tensors in `written` must pass `writable`, which explains `elementwise`. If gradients are
    enabled, no tensor may require a gradient.
    """
    writable(written, read, elementwise)
    if not torch.is_grad_enabled():
        return
    for name, value in {**written, **read}.items():
        if value is not None and value.requires_grad:
            raise ValueError(f"inplace: got True, needs False because {name} requires a gradient")


def no_gradient(tensors: dict, why: str) -> None:
    """Raise ValueError if gradients are enabled and one of the tensors requires a gradient.

    why: end of the message.
    """
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            got = f"{name}: got a tensor that requires a gradient"
            raise ValueError(f"{got}, needs torch.no_grad(){why}")


def writable(written: dict, read: dict, elementwise: bool = False) -> None:
    """Raise ValueError unless the tensors in `written` can be overwritten; None values are skipped.

    Each element needs its own memory, and none may share memory with another tensor in `written` or
    `read`. An inference tensor can only be overwritten in inference mode.

    elementwise: True if the kernel reads each element before it overwrites it. A tensor in `read`
    may then have the same memory and layout as a written one.
    """
    # Traced tensors have no memory yet. The operator's fake kernel looks for memory that two
    # tensors share.
    traced = library.is_traced()
    for name, value in written.items():
        if value is None:
            continue
        if not value.is_contiguous() and _expanded(value):
            raise ValueError(f"{name}: got an expanded tensor, needs memory for each element")
        if not traced and value.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: got an inference tensor, needs torch.inference_mode() to be written to"
            )
        if not traced and memory.overlaps_itself(value):
            raise ValueError(f"{name}: got elements that overlap, needs memory for each element")
    if not traced:
        memory.apart(written, read, elementwise)


def _expanded(x: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))


def short(dtype: torch.dtype | torch.layout) -> str:
    """Return a dtype as messages spell it, without "torch."."""
    return str(dtype).removeprefix("torch.")
