"""Flash attention in Triton, for Ascend and NVIDIA. Reference: reference.py

Forward: a program processes a block of queries of one head against the keys in its window
(forward.py). Backward: one kernel processes a block of keys against its queries, another a block of
queries against its keys (backward.py). The blocks of packed sequences are found on the device
(blocks.py).
"""

from __future__ import annotations

import torch

from npu_ops.core import hardware, rng
from npu_ops.core.grid import cdiv, next_power_of_2, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.attention.triton_ascend import backward
from npu_ops.ops.attention.triton_ascend.blocks import blocks_of
from npu_ops.ops.attention.triton_ascend.dropout import keep_bits
from npu_ops.ops.attention.triton_ascend.forward import forward_kernel

# In decoding, the query heads that share a key head become rows of one tile per sequence, if there
# are at most this many rows.
SHARED_ROWS = 128
SMALL_TILE = 32
# Upper bound of the larger head dimension of q and v -> (queries, keys) of a tile. Half of a tile's
# scores must fit into the unified buffer of a vector core.
FORWARD_TILES = {128: (128, 64), 256: (64, 32)}
# Upper bound of the bytes of a row of q plus a row of v -> (queries, keys) of a tile. The sums of
# gradients need memory next to the matrix unit.
KEYS_TILES = {512: (64, 64), 1024: (32, 32), 2048: (16, 32)}
QUERIES_TILES = {1024: (64, 32), 2048: (32, 32)}
DELTA_BYTES = 32 * 1024


def attention(q, k, v, extra, rule, out, lse):
    """Write `out` and `lse`; the arguments are the operator's."""
    _attention(q, k, v, extra, rule, out, lse)
    finish(int32_starts(extra.cu_seqlens_q), out.transpose(1, 2), lse.transpose(1, 2))


def _attention(q, k, v, extra, rule, out, lse):
    extra = _dense(extra)
    step, max_queries = q.shape[1] // k.shape[1], rule.max_seqlen_q
    if not _shares_rows(extra, rule, step):
        return _forward(q, k, v, extra, rule, extra.sinks, out, lse)
    sinks = extra.sinks
    if sinks is not None and step > 1:  # one for each row of a sequence
        sinks = sinks.view(-1, 1, step).repeat(1, max_queries, 1).flatten(1)
    starts = None if extra.cu_seqlens_q is None else extra.cu_seqlens_q * step
    extra = extra._replace(cu_seqlens_q=starts)
    shared_q, shared_out, shared_lse = (_shared(x, step) for x in (q, out, lse[..., None]))
    rows = max_queries * step
    _forward(shared_q, k, v, extra, rule, sinks, shared_out, shared_lse, rows, step)
    for x, shared in ((out, shared_out), (lse[..., None], shared_lse)):
        if shared.data_ptr() != x.data_ptr():
            x.copy_(shared.unflatten(2, (-1, step)).transpose(2, 3).flatten(1, 2))


def attention_backward(
    grad_out, grad_lse, out, lse, q, k, v, extra, rule,
    grad_q, grad_k, grad_v, grad_bias, grad_sinks,
):  # fmt: skip
    """Write the gradients that are not None; the arguments are the operator's."""
    extra = _dense(extra)
    delta = _delta(grad_out, grad_lse, out)
    constants = _constants(q, k, v, rule)
    keep, *numbers = _keep_and_numbers(k, extra, rule, lse)
    given, strides = _with_strides(q, (grad_out, q, k, v, extra.bias, extra.mask))

    row_bytes = (constants["BD"] + constants["BDV"]) * q.element_size()
    size_q, size_k = _tile(KEYS_TILES, row_bytes)
    if rule.dropout_p:
        size_q, size_k = min(size_q, SMALL_TILE), min(size_k, SMALL_TILE)
    blocks = blocks_of(k, extra.cu_seqlens_k, size_k)
    lengths = extra.cu_seqlens_q, extra.cu_seqlens_k, extra.seqlens_k, lse, delta
    backward.keys_kernel[_cube_grid(blocks.number * k.shape[1], q.device)](
        *given, keep, blocks.table, *lengths, grad_k, grad_v, *strides, *grad_k.stride()[:3],
        *grad_v.stride()[:3], *numbers, blocks.number, blocks.across, k.shape[1], q.shape[2],
        k.shape[2], BQ=size_q, BK=size_k, **constants,
    )  # fmt: skip

    size_q, size_k = _tile(QUERIES_TILES, row_bytes)
    blocks = blocks_of(q, extra.cu_seqlens_q, size_q)
    grad_pairs = None
    if grad_bias is not None:  # zeros, because no tile covers pairs outside the window
        grad_pairs = grad_bias.new_zeros((*q.shape[:3], k.shape[2]))
    backward.queries_kernel[_cube_grid(blocks.number * q.shape[1], q.device)](
        *given, keep, blocks.table, *lengths, grad_q, grad_pairs, *strides, *grad_q.stride()[:3],
        *numbers, blocks.number, blocks.across, q.shape[1], q.shape[2], k.shape[2],
        BQ=size_q, BK=size_k, **constants,
    )  # fmt: skip
    if grad_bias is not None:
        grad_bias.copy_(grad_pairs.sum_to_size(grad_bias.shape))
    finish(int32_starts(extra.cu_seqlens_q), grad_q.transpose(1, 2), delta.transpose(1, 2))
    finish(int32_starts(extra.cu_seqlens_k), grad_k.transpose(1, 2), grad_v.transpose(1, 2))
    if grad_sinks is not None:
        weights = (extra.sinks[:, None] - lse).exp()
        torch.sum(weights * -delta, (0, 2), out=grad_sinks)


def _dense(extra):
    """Make lengths and block table contiguous: the kernels read them with stride 1."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")
    return extra._replace(
        **{n: x.contiguous() for n in names if (x := getattr(extra, n)) is not None}
    )


def _forward(q, k, v, extra, rule, sinks, out, lse, rows=None, step=1):
    """Run `attention` with `step` rows of q per position and at most `rows` rows per sequence."""
    constants = _constants(q, k, v, rule)
    size_q, size_k = _tile(FORWARD_TILES, max(constants["BD"], constants["BDV"]))
    if rows is not None and rows <= SMALL_TILE:
        size_q = SMALL_TILE
    if constants["CAPPED"] and extra.bias is not None:
        size_k = min(size_k, SMALL_TILE)
    if rule.dropout_p:  # the dropout bits take the space of half a tile
        size_q //= 2
    page, pages_stride, keys = 1, 0, k.shape[2]
    if extra.block_table is not None:
        page, pages_stride = k.shape[2], extra.block_table.stride(0)
        keys = extra.block_table.shape[1] * page
        size_k = min(size_k, page & -page)  # a divisor of the block size
    blocks = blocks_of(q, extra.cu_seqlens_q, size_q)
    given, strides = _with_strides(q, (q, k, v, extra.bias, extra.mask))
    keep, *numbers = _keep_and_numbers(k, extra, rule, lse)
    forward_kernel[_cube_grid(blocks.number * q.shape[1], q.device)](
        *given, keep, sinks, blocks.table, extra.cu_seqlens_q, extra.cu_seqlens_k, extra.seqlens_k,
        extra.block_table, out, lse, *strides, *out.stride()[:3], pages_stride,
        k.shape[0], rows or 0, *numbers, blocks.number, blocks.across, q.shape[1], q.shape[2],
        keys, BQ=size_q, BK=size_k, PAGE=page, STEP=step, **constants,
    )  # fmt: skip


def _delta(grad_out, grad_lse, out):
    """Return fp32 `[B, N, Sq]`: the inner products of rows of out and grad_out, minus grad_lse."""
    batch, heads, queries, dim = out.shape
    delta = out.new_empty((batch, heads, queries), dtype=torch.float32)
    width = max(16, next_power_of_2(dim))
    size = DELTA_BYTES // 4 // width
    across = cdiv(queries, size)
    backward.delta_kernel[vector_grid(batch * across * heads, out.device)](
        grad_out, grad_lse, out, delta, *grad_out.stride()[:3], *out.stride()[:3], batch * across,
        across, heads, queries, DV=dim, BDV=width, BQ=size,
    )  # fmt: skip
    return delta


def _shares_rows(extra, rule, step: int) -> bool:
    """Return whether the heads of a group are processed as rows of one tile."""
    decodes = extra.seqlens_k is not None or rule.max_seqlen_q == 1
    plain = extra.bias is None and extra.mask is None
    return decodes and plain and not rule.dropout_p and rule.max_seqlen_q * step <= SHARED_ROWS


def _shared(x, step: int):
    """Return `[batch, heads, tokens, dim]` as `[batch, heads / step, tokens * step, dim]`.

    A view if possible, else a copy.
    """
    return x.unflatten(1, (-1, step)).transpose(2, 3).flatten(2, 3)


def _constants(q, k, v, rule) -> dict:
    """Return the compile-time constants of all kernels."""
    width, columns = (max(16, next_power_of_2(x.shape[3])) for x in (q, v))
    return {
        "GROUP": q.shape[1] // k.shape[1], "D": q.shape[3], "DV": v.shape[3], "BD": width,
        "BDV": columns, "LEFT": rule.window_left >= 0, "RIGHT": rule.window_right >= 0,
        "BOTTOM_RIGHT": rule.bottom_right, "CAPPED": rule.softcap > 0,
    }  # fmt: skip


def _keep_and_numbers(k, extra, rule, lse) -> tuple:
    """Return the dropout bits or None, then the kernels' scalars.

    The last two scalars are dropout's: the row stride of its bits and the scale of kept weights.
    """
    numbers = rule.scale, rule.softcap, rule.window_left, rule.window_right
    if not rule.dropout_p:
        return None, *numbers, 0, 1.0
    in_sequences = extra.cu_seqlens_q is not None or extra.block_table is not None
    keys = rule.max_seqlen_k if in_sequences else k.shape[2]
    keep = keep_bits(lse.numel(), keys, rule.dropout_p, extra.rng_state)
    return keep, *numbers, keep.stride(0), rng.scale(rule.dropout_p)


def _tile(tiles: dict, size: int) -> tuple[int, int]:
    return next(tile for most, tile in tiles.items() if size <= most)


def _with_strides(q, given):
    """Return the tensors as kernels take them, and the strides of their first three dimensions.

    Kernels take masks as bytes, and a contiguous last dimension. A broadcast dimension has stride
    0.
    """
    tensors, strides = [], []
    for x in given:
        if x is not None and x.dtype == torch.bool:
            x = x.view(torch.uint8)
        if x is not None and x.stride(3) != 1:
            x = x.contiguous()
        tensors.append(x)
        strides += _strides(x, q)
    return tensors, strides


def _strides(x, q) -> tuple[int, ...]:
    if x is None:
        return 0, 0, 0
    broadcast = (n if m == 1 else 1 for m, n in zip(x.shape[:3], q.shape[:3], strict=True))
    return tuple(0 if n != 1 else s for n, s in zip(broadcast, x.stride(), strict=False))


def _cube_grid(items: int, device) -> tuple[int]:
    return (min(items, hardware.num_cube_cores(device)),)
