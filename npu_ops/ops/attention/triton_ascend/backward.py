"""Computes the gradients of attention. Kernels recompute the weights from lse, tile by tile.

One kernel sums over the queries for each block of keys, another over the keys for each block of
queries. Both recompute the scores. So no two programs add to the same sum, and the order of
programs does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.attention.triton_ascend.blocks import edge_block, find, partners
from npu_ops.ops.attention.triton_ascend.dropout import load_keep
from npu_ops.ops.attention.triton_ascend.tiles import (
    LOWEST,
    load_rows,
    of_head,
    scores_of,
    store_pairs,
    store_rows,
)


@triton.jit(do_not_specialize=["number", "across", "heads", "queries"])
def delta_kernel(
    grad_out, grad_lse, out, delta, grad_out_batch, grad_out_head, grad_out_stride, out_batch,
    out_head, out_stride, number, across, heads, queries, DV: tl.constexpr, BDV: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """Compute delta, fp32 like lse: the inner product of each row of out and grad_out, minus
    grad_lse."""
    row = tl.arange(0, BQ)
    for item in range(tl.program_id(0), number * heads, tl.num_programs(0)):
        block, head = item // heads, item % heads
        batch, first = block // across, block % across * BQ
        rows = queries - first
        from_grad_out = of_head(grad_out, batch, head, grad_out_batch, grad_out_head)
        from_out = of_head(out, batch, head, out_batch, out_head)
        b_grad_out = load_rows(from_grad_out, grad_out_stride, first, rows, DV, BDV, BQ)
        b_out = load_rows(from_out, out_stride, first, rows, DV, BDV, BQ)
        total = tl.sum(b_grad_out.to(tl.float32) * b_out.to(tl.float32), 1)
        place = tl.cast(batch * heads + head, tl.int64) * queries + first
        if grad_lse is not None:
            total -= tl.load(grad_lse + place + row, mask=row < rows, other=0.0)
        tl.store(delta + place + row, total, mask=row < rows)


@triton.jit
def _gradient_of_scores(scores, b_lse, b_delta, b_grad_out, b_v, keep, keep_stride, kept_scale,
                        row0, rows, key0, BQ: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return the weights after dropout, not multiplied by kept_scale, and the scores' gradients."""
    weights = tl.exp(scores - tl.maximum(b_lse, LOWEST)[:, None])
    grad_weights = tl.dot(b_grad_out, tl.trans(b_v), input_precision="ieee")
    dropped = weights
    if keep is not None:
        kept = load_keep(keep, keep_stride, row0, rows, key0, BQ, BK)
        dropped = weights * kept
        grad_weights = grad_weights * (kept * kept_scale)
    return dropped, weights * (grad_weights - b_delta[:, None])


@triton.jit
def _of_queries(
    grad_k, grad_v, b_k, b_v, q, grad_out, lse, delta, bias, mask, keep, q_stride, grad_out_stride,
    bias_stride, mask_stride, place, first_q, query0, key0, lq, lk, shift, left, right, scale,
    softcap, keep_stride, kept_scale, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of BQ queries to the gradients of BK keys and values."""
    rows, row = lq - query0, tl.arange(0, BQ)
    b_q = load_rows(q, q_stride, first_q + query0, rows, D, BD, BQ, MASKED)
    b_grad_out = load_rows(grad_out, grad_out_stride, first_q + query0, rows, DV, BDV, BQ, MASKED)
    b_lse = tl.load(lse + place + query0 + row, mask=row < rows, other=0.0)
    b_delta = tl.load(delta + place + query0 + row, mask=row < rows, other=0.0)
    scores, slope = scores_of(
        b_q, b_k, bias, mask, bias_stride, mask_stride, query0, key0, lq, lk, shift, left, right,
        scale, softcap, BQ, BK, 1, LEFT, RIGHT, CAPPED, MASKED,
    )  # fmt: skip
    weights, grad_scores = _gradient_of_scores(
        scores, b_lse, b_delta, b_grad_out, b_v, keep, keep_stride, kept_scale, place + query0,
        rows, key0, BQ, BK,
    )  # fmt: skip
    grad_v += tl.dot(tl.trans(weights.to(b_grad_out.dtype)), b_grad_out, input_precision="ieee")
    grad_product = (grad_scores * slope).to(b_q.dtype)
    grad_k += tl.dot(tl.trans(grad_product), b_q, input_precision="ieee")
    return grad_k, grad_v


@triton.jit(
    do_not_specialize=[
        "scale", "softcap", "left", "right", "keep_stride", "kept_scale", "number", "across",
        "heads", "queries", "keys", "bias_batch", "bias_head", "bias_stride", "mask_batch",
        "mask_head", "mask_stride",
    ]
)  # fmt: skip
def keys_kernel(
    grad_out, q, k, v, bias, mask, keep, table, starts_q, starts_k, lengths_k, lse, delta, grad_k,
    grad_v, grad_out_batch, grad_out_head, grad_out_stride, q_batch, q_head, q_stride, k_batch,
    k_head, k_stride, v_batch, v_head, v_stride, bias_batch, bias_head, bias_stride, mask_batch,
    mask_head, mask_stride, grad_k_batch, grad_k_head, grad_k_stride, grad_v_batch, grad_v_head,
    grad_v_stride, scale, softcap, left, right, keep_stride, kept_scale, number, across, heads,
    queries, keys,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute grad_k and grad_v of BK keys of one key head, summed over its GROUP query heads."""
    for item in range(tl.program_id(0), number * heads, tl.num_programs(0)):
        block, key_head = item // heads, item % heads
        _, within, batch, first_q, lq, first_k, lk = find(
            block, table, number, across, starts_q, starts_k, lengths_k, queries, keys
        )
        shift = 0
        if BOTTOM_RIGHT:
            shift = lk - lq
        key0 = within * BK
        rows = lk - key0
        lq = tl.where(rows > 0, lq, 0)
        if keep is not None:  # keys without dropout bits are skipped
            lq = tl.where(key0 < keep_stride * 8, lq, 0)
        from_k = of_head(k, batch, key_head, k_batch, k_head)
        from_v = of_head(v, batch, key_head, v_batch, v_head)
        b_k = load_rows(from_k, k_stride, first_k + key0, rows, D, BD, BK)
        b_v = load_rows(from_v, v_stride, first_k + key0, rows, DV, BDV, BK)
        begin, whole, split, end = partners(
            key0 - shift, tl.minimum(key0 + BK, lk) - 1 - shift, right, left, lq, BQ, RIGHT, LEFT,
            mask is None,
        )  # fmt: skip
        sum_k, sum_v = tl.zeros((BK, BD), tl.float32), tl.zeros((BK, BDV), tl.float32)
        for head in range(key_head * GROUP, (key_head + 1) * GROUP):
            from_q = of_head(q, batch, head, q_batch, q_head)
            from_grad_out = of_head(grad_out, batch, head, grad_out_batch, grad_out_head)
            place = tl.cast(batch * heads * GROUP + head, tl.int64) * queries + first_q
            of_bias, of_mask = bias, mask
            if bias is not None:
                of_bias = of_head(bias, batch, head, bias_batch, bias_head)
            if mask is not None:
                of_mask = of_head(mask, batch, head, mask_batch, mask_head)
            if mask is None:
                for query0 in range(whole * BQ, split * BQ, BQ):
                    sum_k, sum_v = _of_queries(
                        sum_k, sum_v, b_k, b_v, from_q, from_grad_out, lse, delta, of_bias, None,
                        keep, q_stride, grad_out_stride, bias_stride, mask_stride, place, first_q,
                        query0, key0, lq, lk, shift, left, right, scale, softcap, keep_stride,
                        kept_scale, D, DV, BD, BDV, BQ, BK, LEFT, RIGHT, CAPPED, False,
                    )  # fmt: skip
            for edge in range(begin, end - (split - whole)):
                query0 = edge_block(edge, whole, split) * BQ
                sum_k, sum_v = _of_queries(
                    sum_k, sum_v, b_k, b_v, from_q, from_grad_out, lse, delta, of_bias, of_mask,
                    keep, q_stride, grad_out_stride, bias_stride, mask_stride, place, first_q,
                    query0, key0, lq, lk, shift, left, right, scale, softcap, keep_stride,
                    kept_scale, D, DV, BD, BDV, BQ, BK, LEFT, RIGHT, CAPPED, True,
                )  # fmt: skip
        written = rows
        if lengths_k is not None:  # also write the gradients of keys beyond the length, which are 0
            written = keys - key0
            exists = (tl.arange(0, BK) < rows)[:, None]
            sum_k, sum_v = tl.where(exists, sum_k, 0.0), tl.where(exists, sum_v, 0.0)
        to_k = of_head(grad_k, batch, key_head, grad_k_batch, grad_k_head)
        to_v = of_head(grad_v, batch, key_head, grad_v_batch, grad_v_head)
        store_rows(to_k, sum_k * scale, grad_k_stride, first_k + key0, written, D, BD, BK)
        if keep is not None:
            sum_v = sum_v * kept_scale
        store_rows(to_v, sum_v, grad_v_stride, first_k + key0, written, DV, BDV, BK)


@triton.jit
def _of_keys(
    grad_q, grad_bias, b_q, b_grad_out, b_lse, b_delta, k, v, bias, mask, keep, k_stride, v_stride,
    bias_stride, mask_stride, first_k, row0, query0, key0, lq, lk, bias_keys, shift, left, right,
    scale, softcap, keep_stride, kept_scale, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of BK keys to the gradient of BQ queries."""
    b_k = load_rows(k, k_stride, first_k + key0, lk - key0, D, BD, BK, MASKED)
    b_v = load_rows(v, v_stride, first_k + key0, lk - key0, DV, BDV, BK, MASKED)
    scores, slope = scores_of(
        b_q, b_k, bias, mask, bias_stride, mask_stride, query0, key0, lq, lk, shift, left, right,
        scale, softcap, BQ, BK, 1, LEFT, RIGHT, CAPPED, MASKED,
    )  # fmt: skip
    _, grad_scores = _gradient_of_scores(
        scores, b_lse, b_delta, b_grad_out, b_v, keep, keep_stride, kept_scale, row0, lq - query0,
        key0, BQ, BK,
    )  # fmt: skip
    if grad_bias is not None:
        store_pairs(grad_bias, grad_scores, bias_keys, query0, key0, lq, lk, BQ, BK)
    return grad_q + tl.dot((grad_scores * slope).to(b_k.dtype), b_k, input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "scale", "softcap", "left", "right", "keep_stride", "kept_scale", "number", "across",
        "heads", "queries", "keys", "bias_batch", "bias_head", "bias_stride", "mask_batch",
        "mask_head", "mask_stride",
    ]
)  # fmt: skip
def queries_kernel(
    grad_out, q, k, v, bias, mask, keep, table, starts_q, starts_k, lengths_k, lse, delta, grad_q,
    grad_bias, grad_out_batch, grad_out_head, grad_out_stride, q_batch, q_head, q_stride, k_batch,
    k_head, k_stride, v_batch, v_head, v_stride, bias_batch, bias_head, bias_stride, mask_batch,
    mask_head, mask_stride, grad_q_batch, grad_q_head, grad_q_stride,
    scale, softcap, left, right, keep_stride, kept_scale, number, across, heads, queries, keys,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute grad_q of BQ queries, and their part of grad_bias [batch, heads, queries, keys]."""
    row = tl.arange(0, BQ)
    for item in range(tl.program_id(0), number * heads, tl.num_programs(0)):
        block, head = item // heads, item % heads
        _, within, batch, first_q, lq, first_k, lk = find(
            block, table, number, across, starts_q, starts_k, lengths_k, queries, keys
        )
        shift = 0
        if BOTTOM_RIGHT:
            shift = lk - lq
        query0 = within * BQ
        rows = lq - query0
        lk = tl.where(rows > 0, lk, 0)
        if keep is not None:
            lk = tl.minimum(lk, keep_stride * 8)
        begin, whole, split, end = partners(
            query0 + shift, tl.minimum(query0 + BQ, lq) - 1 + shift, left, right, lk, BK, LEFT,
            RIGHT, mask is None,
        )  # fmt: skip
        from_k = of_head(k, batch, head // GROUP, k_batch, k_head)
        from_v = of_head(v, batch, head // GROUP, v_batch, v_head)
        from_q = of_head(q, batch, head, q_batch, q_head)
        from_grad_out = of_head(grad_out, batch, head, grad_out_batch, grad_out_head)
        of_bias, of_mask = bias, mask
        if bias is not None:
            of_bias = of_head(bias, batch, head, bias_batch, bias_head)
        if mask is not None:
            of_mask = of_head(mask, batch, head, mask_batch, mask_head)
        of_grad_bias = grad_bias
        if grad_bias is not None:
            of_grad_bias = of_head(
                grad_bias, batch * heads + head, 0, tl.cast(queries, tl.int64) * keys, 0
            )
        place = tl.cast(batch * heads + head, tl.int64) * queries + first_q + query0
        b_q = load_rows(from_q, q_stride, first_q + query0, rows, D, BD, BQ)
        b_grad_out = load_rows(from_grad_out, grad_out_stride, first_q + query0, rows, DV, BDV, BQ)
        b_lse = tl.load(lse + place + row, mask=row < rows, other=0.0)
        b_delta = tl.load(delta + place + row, mask=row < rows, other=0.0)
        total = tl.zeros((BQ, BD), tl.float32)
        if mask is None:
            for key0 in range(whole * BK, split * BK, BK):
                total = _of_keys(
                    total, of_grad_bias, b_q, b_grad_out, b_lse, b_delta, from_k, from_v, of_bias,
                    None, keep, k_stride, v_stride, bias_stride, mask_stride, first_k, place,
                    query0, key0, lq, lk, keys, shift, left, right, scale, softcap, keep_stride,
                    kept_scale, D, DV, BD, BDV, BQ, BK, LEFT, RIGHT, CAPPED, False,
                )  # fmt: skip
        for edge in range(begin, end - (split - whole)):
            key0 = edge_block(edge, whole, split) * BK
            total = _of_keys(
                total, of_grad_bias, b_q, b_grad_out, b_lse, b_delta, from_k, from_v, of_bias,
                of_mask, keep, k_stride, v_stride, bias_stride, mask_stride, first_k, place,
                query0, key0, lq, lk, keys, shift, left, right, scale, softcap, keep_stride,
                kept_scale, D, DV, BD, BDV, BQ, BK, LEFT, RIGHT, CAPPED, True,
            )  # fmt: skip
        to = of_head(grad_q, batch, head, grad_q_batch, grad_q_head)
        store_rows(to, total * scale, grad_q_stride, first_q + query0, rows, D, BD, BQ)
