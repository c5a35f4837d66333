"""Argument checks with one form of message: the argument, what it got, what it needs."""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOATS_TEXT = "float32, bfloat16, float16 or float64"


def tensor(name: str, value) -> None:
    """Raise TypeError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a tensor")


def floating(name: str, value: torch.Tensor) -> None:
    """Raise TypeError unless `value` is a tensor of a floating dtype that the ops take."""
    tensor(name, value)
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: got {_short(value.dtype)}, needs {_FLOATS_TEXT}")


def same_device(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless both are on one device."""
    if value.device != other.device:
        raise ValueError(f"{name}: got device {value.device}, needs {other_name}'s {other.device}")


def one_of(name: str, value, allowed: tuple) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(map(repr, allowed))}")


def alone(name: str, **others) -> None:
    """Raise ValueError unless all `others`, which do not go with `name`, are None."""
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"{other}: got one with {name}, needs None")


def shape(name: str, value: torch.Tensor, needs: str) -> ValueError:
    """The error for a tensor of the wrong shape; `needs` is a phrase."""
    return ValueError(f"{name}: got shape {list(value.shape)}, needs {needs}")


def epsilon(name: str, value) -> None:
    """Raise ValueError unless `value` is a finite number that is not negative."""
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: got {value!r}, needs a finite number, 0 or more")


def writable(name: str, value: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError unless `value` may be overwritten in place.

    That needs memory of its own for every element, and no gradient of it or of `others`.
    """
    if any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        raise ValueError(
            f"{name}: got an expanded tensor, inplace=True needs memory for each element"
        )
    if not torch.is_grad_enabled():
        return
    for other_name, other in ({name: value} | others).items():
        if other is not None and other.requires_grad:
            raise ValueError(
                f"inplace: got True, needs False because {other_name} requires a gradient"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
