"""Shared by causal_conv1d, causal_conv1d_qkv and causal_conv1d_update: checks their arguments."""

from __future__ import annotations

import torch

from npu_ops.core import check, indices, library

WIDTHS = tuple(range(2, 9))
ACTIVATIONS = (None, "silu", "swish")


def narrow_alone(arguments) -> str | None:
    """Return why kernels that keep each filter tap in a register do not support a call, or None."""
    taps = arguments.weight.shape[1]
    return f"a filter of {taps} taps has more than 4" if taps > 4 else None


def check_rows(x, weight, bias, activation, cu_seqlens, shared: bool = False) -> None:
    """Check x, `[B, T, D]`, and the arguments that causal_conv1d and causal_conv1d_qkv share.

    shared: other ranks hold tokens of the packed sequences, so the total number is unknown here.
    """
    check.floating("x", x)
    if x.dim() != 3:
        raise check.shape("x", x, "[B, T, D]")
    check_filter(weight, bias, activation, x)
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens, x, None if shared else x.shape[1])
        if x.shape[0] != 1:
            raise check.shape("x", x, "a batch of 1 with cu_seqlens")


def check_filter(weight, bias, activation, x) -> None:
    """Check the arguments of the filter, which all three functions share."""
    _check_parameter("weight", weight, x)
    channels = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] not in WIDTHS:
        raise check.shape("weight", weight, f"[{channels}, W] with W 2 to 8")
    if bias is not None:
        _check_parameter("bias", bias, x)
        if bias.shape != (channels,):
            raise check.shape("bias", bias, f"[{channels}]")
    check.one_of("activation", activation, ACTIVATIONS)


def _check_parameter(name, value, x) -> None:
    check.floating(name, value)
    check.same_device(name, value, "x", x)
    check.dtype(name, value, x.dtype, torch.float32, whose="x's ")


def check_like_x(name, value, x, shape, form: str) -> None:
    """Check an optional tensor of x's dtype and device. form: describes `shape` in the message."""
    if value is None:
        return
    check.floating(name, value)
    check.same_device(name, value, "x", x)
    check.same_dtype(name, value, "x", x)
    if value.shape != shape:
        raise check.shape(name, value, f"{form} {list(shape)}")


def check_integers(name, value, x, length: int | None = None) -> None:
    """Check an int32 or int64 vector on x's device, with `length` elements unless None."""
    check.indices(name, value)
    check.same_device(name, value, "x", x)
    if value.dim() != 1 or length not in (None, value.shape[0]):
        raise check.shape(name, value, "one dimension" if length is None else f"[{length}]")


def check_starts(name, starts, x, tokens: int | None) -> None:
    """Check the starts of packed sequences and the end of the last.

    tokens: number of tokens; None if unknown. If it is known, values on the CPU are checked, too.
    """
    check_integers(name, starts, x)
    if starts.shape[0] < (1 if tokens == 0 else 2):
        raise check.shape(name, starts, "[N + 1]")
    if tokens is not None and library.readable(starts):
        indices.check_starts(name, starts, tokens)
