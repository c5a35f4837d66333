"""Runs causal_conv1d's decoding step in a server: a few tokens per sequence, states in a pool."""

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
    """Apply `causal_conv1d` to new tokens, with a pool of states that is updated in place.

    It computes in fp32 (float64: in float64) and rounds once. Nothing waits for the device, so
    calls can be captured in a graph.

    - Decode: the first W - 1 columns of a slot hold the last rows of its sequence, before and after
      the call. Further columns are not touched.
    - Verify in vLLM's way: `num_accepted_tokens` says how many tokens of the last step were
      accepted (at least 1). The history begins at column `num_accepted_tokens - 1`. All rows but
      the first are stored: `W - 2 + T` columns, from which the next step selects its history.
    - Verify in SGLang's way: the state after each token is written to `intermediate_conv_window`,
      usually with `disable_state_update`.

    Args:
        x: `[B, D]`, one token each; `[B, T, D]`; or `[tokens, D]` packed by query_start_loc. Its
            dtype is float32, bfloat16, float16 or float64. It may be strided if channels are
            contiguous.
        conv_state: `[slots, D, L]` of x's dtype, L at least W - 1, with any strides. Contiguous D,
            i.e. `[slots, L, D]` transposed, is fastest on an NPU. For a cache of W columns, as in
            fla and Hugging Face, pass `cache[..., 1:]`.
        weight: `[D, W]` with W 2 to 8, of x's dtype or float32. bias: `[D]`, likewise, or None.
        activation: "silu", "swish" (the same) or None.
        conv_state_indices: int32 or int64 `[B]`, the slot of each sequence, all different unless
            disable_state_update; pad_slot_id skips a sequence. None: B slots in order.
        num_accepted_tokens: int32 or int64 `[B]`.
        query_start_loc: int32 or int64 `[B + 1]`: the starts of sequences, then the end of the
            last; sequences may be empty. Outputs of tokens behind the end are 0.
        pad_slot_id: sequences with this value in conv_state_indices are skipped: no state is read
            or written, outputs are 0.
        intermediate_conv_window: `[rows, T, D, W - 1]` of x's dtype, with T or more steps; not with
            query_start_loc.
        intermediate_state_indices: int32 or int64 `[B]`, the row of intermediate_conv_window for
            each sequence, or -1 to store nothing; None: row b for sequence b.
        disable_state_update: leave the pool unchanged.

    Returns:
        y, like x. There is no gradient.

    Raises:
        TypeError: a dtype is not supported; the state is never converted.
        ValueError: a shape or a device is invalid, or a gradient is required. On the CPU also:
            - an index or a count is outside its range;
            - two sequences share a slot;
            - the state has too few columns for the tokens.

    On a device, a sequence with an invalid slot or count gets NaN outputs, and its state stays
    unchanged. With an invalid query_start_loc this holds for all sequences. Rows beyond the state's
    last column are not stored.

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
    """Check the public arguments; return the operator's inputs."""
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
    check.no_gradient(tensors, ": causal_conv1d_update has no gradient")
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
        # with slots in order, no slot is skipped
        -1 if conv_state_indices is None else pad_slot_id,
        activation is not None, not disable_state_update,
    )  # fmt: skip


def _tokens(x, query_start_loc):
    """Return x as `[B, T, D]`, or `[1, tokens, D]` if packed, and the number of sequences."""
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
    """Check the pool's shape: it needs W - 1 columns plus `extra`."""
    check.same_device("conv_state", conv_state, "x", x)
    check.same_dtype("conv_state", conv_state, "x", x)
    channels, columns = x.shape[-1], width - 1 + extra
    if conv_state.dim() != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < columns:
        needs = f"[slots, {channels}, L] with L {columns} or more"
        raise check.shape("conv_state", conv_state, needs)


def _check_numbers(conv_state, batch, indices, accepted, pad_slot_id, x):
    """Check the shapes and dtypes of slots and counts, not their values."""
    if indices is None and conv_state.shape[0] != batch:
        raise check.shape("conv_state", conv_state, f"{batch} slots without conv_state_indices")
    if not isinstance(pad_slot_id, int):
        raise TypeError(f"pad_slot_id: got {type(pad_slot_id).__name__}, needs an int")
    if indices is not None:
        arguments.check_integers("conv_state_indices", indices, x, batch)
    if accepted is not None:
        arguments.check_integers("num_accepted_tokens", accepted, x, batch)


def _each_element_once(window):
    """View overlapping windows as a tensor in which each element is there once.

    SGLang's windows share memory: each is the window before it, shifted by one token. Shared
    elements are equal, so writing them twice is safe, but a check for overlaps would reject it. The
    view is `[rows, D, T + W - 2]`.
    """
    if window is None or not library.is_plain(window) or window.stride(1) != window.stride(3):
        return window
    rows, tokens, channels, taps = window.shape
    strides = window.stride(0), window.stride(2), window.stride(3)
    return window.as_strided((rows, channels, tokens + taps - 1), strides)


def _check_window(window, window_indices, rows, width, batch, starts):
    if window is None:
        if window_indices is not None:
            raise ValueError(
                "intermediate_state_indices: got a value, needs intermediate_conv_window too"
            )
        return
    if starts is not None:
        raise ValueError("intermediate_conv_window: got a value, needs no query_start_loc")
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
