"""Shared by causal_conv1d, causal_conv1d_qkv and causal_conv1d_update: their reference.

The reference puts all rows into one matrix: first W rows of initial state for each sequence (zeros
without one), then all tokens of the batch or of the packed sequences. A filter tap reads a row by
its index in this matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_ops.core import lengths, make


def causal_conv1d(x, weight, bias, residual, initial_state, cu_seqlens, silu):
    """Compute y_t = act(sum_j weight[:, W - 1 - j] * x_{t - j} + bias) + residual_t.

    x, residual: [B, T, D]. weight: [D, W]. bias: [D]. initial_state: [N, D, W].
    Returns fp32 (fp64 if x or weight is).
    """
    rows = all_rows(x, initial_state, cu_seqlens, weight.shape[1], compute_dtype(x, weight))
    z = _preactivation(rows, x, weight, bias, cu_seqlens)
    y = (F.silu(z) if silu else z).view(x.shape)
    y = y if residual is None else y + residual.to(y.dtype)
    return lengths.without_nobodys(cu_seqlens, y)[0]


def with_final_state(x, weight, bias, residual, initial_state, cu_seqlens, silu):
    """Return y as `causal_conv1d` does, and the last W rows of each sequence."""
    y = causal_conv1d(x, weight, bias, residual, initial_state, cu_seqlens, silu)
    return y, final_state(x, weight.shape[1], initial_state, cu_seqlens)


def final_state(x, width, initial_state, cu_seqlens):
    """Return the last W rows of each sequence, [N, D, W]."""
    dtype = x.dtype if initial_state is None else initial_state.dtype
    rows = all_rows(x, initial_state, cu_seqlens, width, dtype)
    return rows[last_indices(x, cu_seqlens, width)].transpose(1, 2)


def causal_conv1d_backward(
    grad_y, grad_final_state, x, weight, bias, initial_state, cu_seqlens, silu
):  # fmt: skip
    """Return the gradients of x, weight, bias and initial_state. grad_final_state may be None."""
    wide, (channels, width) = compute_dtype(x, weight), weight.shape
    rows = all_rows(x, initial_state, cu_seqlens, width, wide)
    grad_z = grad_y.to(wide).flatten(0, 1)
    behind = torch.zeros(len(grad_z), dtype=torch.bool, device=x.device)
    if cu_seqlens is not None:
        behind, _ = lengths.nobodys(cu_seqlens, x.shape[1])
    if silu:
        z = _preactivation(rows, x, weight, bias, cu_seqlens)
        gate = z.sigmoid()
        grad_z = grad_z * gate * (1 + z * (1 - gate))
    grad_z = grad_z.masked_fill(behind[:, None], 0)
    grad_rows, grad_weight = torch.zeros_like(rows), torch.zeros_like(weight, dtype=wide)
    for back in range(width):
        tap, index = width - 1 - back, indices(x, cu_seqlens, width, back)
        products = (grad_z * rows[index]).masked_fill(behind[:, None], 0)
        grad_weight[:, tap] = products.sum(0)
        grad_rows.index_add_(0, index, grad_z * weight[:, tap].to(wide))
    if grad_final_state is not None:
        index = last_indices(x, cu_seqlens, width).flatten()
        grad_rows.index_add_(0, index, grad_final_state.to(wide).transpose(1, 2).flatten(0, 1))
    grad_state, grad_x = grad_rows.split([len(rows) - len(grad_z), len(grad_z)])
    grad_state = grad_state.view(len(grad_state) // width, width, channels).transpose(1, 2)
    (grad_x,) = lengths.without_nobodys(cu_seqlens, grad_x.view(x.shape))
    return grad_x, grad_weight, grad_z.sum(0), grad_state


def _preactivation(rows, x, weight, bias, cu_seqlens):
    """Return the convolution of all tokens, [B * T, D]."""
    width = weight.shape[1]
    taps = weight.to(rows.dtype).unbind(1)
    z = sum(
        taps[width - 1 - back] * rows[indices(x, cu_seqlens, width, back)] for back in range(width)
    )
    return z if bias is None else z + bias.to(z.dtype)


def all_rows(x, initial_state, cu_seqlens, width, dtype):
    """Return W state rows for each sequence, then the rows of all tokens: [N * W + B * T, D]."""
    count, channels = len(bounds(x, cu_seqlens)[0]), x.shape[-1]
    if initial_state is None:
        state = x.new_zeros((count * width, channels), dtype=dtype)
    else:
        state = initial_state.to(dtype).transpose(1, 2).flatten(0, 1)
    # torch.cat promotes x to the state's dtype, which is at least as wide.
    return torch.cat([state, x.flatten(0, 1)])


def indices(x, cu_seqlens, width, back):
    """Return the index of the row `back` tokens before each token in its sequence: `[B * T]`.

    Rows before a sequence's first token are those of its initial state.
    """
    starts, _ = bounds(x, cu_seqlens)
    token = make.counted(x.shape[0] * x.shape[1], device=x.device)
    sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(0)
    return row_index(starts, width, sequence, token - back).clamp(0)


def last_indices(x, cu_seqlens, width):
    """Return the indices of the last W rows of each sequence, [N, W]."""
    starts, stops = bounds(x, cu_seqlens)
    sequence = make.counted(len(starts), device=x.device)[:, None]
    token = stops[:, None] + make.counted(-width, 0, device=x.device)
    last = len(starts) * width + x.shape[0] * x.shape[1] - 1
    return row_index(starts, width, sequence, token).clamp(0, last)


def row_index(starts, width, sequence, token):
    """Return the row index of a sequence's token; a token before its start is in its state."""
    in_state = (sequence + 1) * width + token - starts[sequence]
    return torch.where(token >= starts[sequence], len(starts) * width + token, in_state)


def bounds(x, cu_seqlens):
    """Return where each sequence starts and ends in the list of all tokens, [N] each."""
    if cu_seqlens is not None:
        return cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    starts = make.counted(x.shape[0], device=x.device) * x.shape[1]
    return starts, starts + x.shape[1]


def compute_dtype(*tensors):
    """Return fp64 if an input is fp64, else fp32."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32
