"""The convolution's decoding step in a server: a few tokens of each sequence, states in a pool."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import explains
from npu_ops.ops.causal_conv1d import arguments
from npu_ops.ops.causal_conv1d_update import op

__all__ = ["causal_conv1d_update"]


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    pad_slot_id: int = -1,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
) -> torch.Tensor:
    """`causal_conv1d` of new tokens behind the rows that a state pool holds, updated in place.

    Computed in fp32, rounded once. Nothing waits for the device, so it can be captured in a graph.

    - Decode: a slot's first W - 1 columns are the last rows of its sequence, and are again after
      it; columns behind them are not touched.
    - Verify, as vLLM does it: with `num_accepted_tokens`, which says how many tokens of the last
      step count (1 and more), the history begins at column `num_accepted_tokens - 1`, and all
      rows but the first go back: `W - 2 + T` columns, from which the next step may take its pick.
    - Verify, as SGLang does it: `intermediate_conv_window` gets what a state would be after each
      token, mostly with `disable_state_update`.

    Args:
        x: `[B, D]`, one token each; `[B, T, D]`; or `[tokens, D]` packed by query_start_loc. It may
            be strided, channels in one piece.
        conv_state: `[slots, D, L]` of x's dtype, L at least W - 1. Any strides: fastest on an NPU
            is D in one piece, `[slots, L, D]` transposed. A cache of W columns as fla and Hugging
            Face keep it goes in as `cache[..., 1:]`.
        weight: `[D, W]` with W 2 to 8, of x's dtype or float32. bias: `[D]`, likewise, or None.
        activation: "silu", "swish" (the same) or None.
        conv_state_indices: int32 or int64 `[B]`, each sequence's slot, all different unless
            disable_state_update; pad_slot_id skips a sequence. None: B slots in order.
        num_accepted_tokens: int32 or int64 `[B]`.
        query_start_loc: int32 or int64 `[B + 1]`, where sequences start and the last one ends; they
            may be empty. Outputs of tokens behind the end are 0.
        pad_slot_id: sequences with this in conv_state_indices are skipped: no state is read or
            written, outputs are 0.
        intermediate_conv_window: `[rows, T, D, W - 1]` of x's dtype, T or more; not with
            query_start_loc.
        intermediate_state_indices: int32 or int64 `[B]`, a row of it, or -1 to keep none; None: row
            b for sequence b.
        disable_state_update: the pool is left as it is.

    Returns:
        y, like x. There is no gradient.

    Raises:
        TypeError: a dtype, also of the state, which is never converted. ValueError: a shape, a
        device, a required gradient, and on the CPU an index or a count outside its range, two
        sequences with one slot, or tokens that the state has no columns for. On a device such a
        sequence's outputs are NaN and its state is left, all of them where query_start_loc is
        wrong; columns that are not there are not kept.

    Source: vLLM and SGLang `causal_conv1d_update`.
    """
    args = _prepare(
        x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens,
        query_start_loc, pad_slot_id=pad_slot_id,
        intermediate_conv_window=intermediate_conv_window,
        intermediate_state_indices=intermediate_state_indices,
        disable_state_update=disable_state_update,
    )  # fmt: skip
    return op.forward(*args).view(x.shape)


def _prepare(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    num_accepted_tokens=None, query_start_loc=None, *, pad_slot_id=-1,
    intermediate_conv_window=None, intermediate_state_indices=None, disable_state_update=False,
):  # fmt: skip
    """Check the public arguments; return them as the operator takes them."""
    rows, batch = _tokens(x, query_start_loc)
    arguments.check_filter(weight, bias, activation, x)
    check.floating("conv_state", conv_state)
    tokens = rows.shape[1] if query_start_loc is None else 1
    extra = 0 if num_accepted_tokens is None else max(tokens - 1, 0)
    _check_state(conv_state, x, weight.shape[1], extra)
    _check_numbers(conv_state, batch, conv_state_indices, num_accepted_tokens, pad_slot_id, x)
    _check_window(
        intermediate_conv_window, intermediate_state_indices, rows, weight.shape[1], batch,
        query_start_loc,
    )  # fmt: skip
    tensors = {"x": x, "conv_state": conv_state, "weight": weight, "bias": bias}
    check.no_gradient(tensors, ", for causal_conv1d_update has none")
    windows = _each_element_once(intermediate_conv_window)
    written = {"conv_state": conv_state, "intermediate_conv_window": windows}
    read = {
        "x": x, "weight": weight, "bias": bias, "conv_state_indices": conv_state_indices,
        "num_accepted_tokens": num_accepted_tokens, "query_start_loc": query_start_loc,
        "intermediate_state_indices": intermediate_state_indices,
    }  # fmt: skip
    check.writable(written, read)
    return (
        rows, conv_state, weight, bias, conv_state_indices, num_accepted_tokens, query_start_loc,
        intermediate_conv_window, intermediate_state_indices,
        -1 if conv_state_indices is None else pad_slot_id,  # -1 is no slot in order
        activation is not None, not disable_state_update,
    )  # fmt: skip


def _tokens(x, query_start_loc):
    """x as `[B, T, D]`, or `[1, tokens, D]` if it is packed; and how many sequences."""
    check.floating("x", x)
    if query_start_loc is None:
        if x.dim() not in (2, 3):
            raise check.shape("x", x, "[B, D] or [B, T, D]")
        return x if x.dim() == 3 else x[:, None], x.shape[0]
    if x.dim() != 2:
        raise check.shape("x", x, "[tokens, D] with query_start_loc")
    arguments.check_integers("query_start_loc", query_start_loc, x)
    if not query_start_loc.shape[0]:
        raise check.shape("query_start_loc", query_start_loc, "[B + 1]")
    return x[None], query_start_loc.shape[0] - 1


def _check_state(conv_state, x, width, extra):
    """The pool's shape; `extra` columns are needed besides W - 1."""
    check.same_device("conv_state", conv_state, "x", x)
    check.same_dtype("conv_state", conv_state, "x", x)
    channels, columns = x.shape[-1], width - 1 + extra
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < columns:
        needs = f"[slots, {channels}, L] with L {columns} or more"
        raise check.shape("conv_state", conv_state, needs)


def _check_numbers(conv_state, batch, indices, accepted, pad_slot_id, x):
    """Slots and counts, without their values."""
    if indices is None and conv_state.shape[0] != batch:
        raise check.shape("conv_state", conv_state, f"{batch} slots without conv_state_indices")
    if not isinstance(pad_slot_id, int):
        raise TypeError(f"pad_slot_id: got {type(pad_slot_id).__name__}, needs an int")
    if indices is not None:
        arguments.check_integers("conv_state_indices", indices, x, batch)
    if accepted is not None:
        arguments.check_integers("num_accepted_tokens", accepted, x, batch)


def _each_element_once(window):
    """SGLang's windows share memory: each is the one before, a token later. What they share is
    equal, so it may be written twice; as `[rows, D, T + W - 2]` each element is there once."""
    if window is None or not library.is_plain(window) or window.stride(1) != window.stride(3):
        return window
    rows, tokens, channels, taps = window.shape
    strides = window.stride(0), window.stride(2), window.stride(3)
    return window.as_strided((rows, channels, tokens + taps - 1), strides)


def _check_window(window, window_indices, rows, width, batch, starts):
    if window is None:
        if window_indices is not None:
            raise ValueError(
                "intermediate_state_indices: got one, needs intermediate_conv_window too"
            )
        return
    if starts is not None:
        raise ValueError("intermediate_conv_window: got one, needs no query_start_loc")
    check.floating("intermediate_conv_window", window)
    check.same_device("intermediate_conv_window", window, "x", rows)
    check.same_dtype("intermediate_conv_window", window, "x", rows)
    _, tokens, channels = rows.shape
    shape = window.shape
    if len(shape) != 4 or shape[1] < tokens or shape[2:] != (channels, width - 1):
        needs = f"[rows, {tokens} or more, {channels}, {width - 1}]"
        raise check.shape("intermediate_conv_window", window, needs)
    if window_indices is None:
        if shape[0] < batch:
            raise check.shape("intermediate_conv_window", window, f"{batch} rows or more")
        return
    arguments.check_integers("intermediate_state_indices", window_indices, rows, batch)


explains("causal_conv1d_update", op.forward, _prepare)
