"""Forward: processes a block of queries of one head against the blocks of keys in its window."""

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
    store_rows,
)


@triton.jit
def _absorb(
    total, weight, highest, b_q, k, v, bias, mask, pages, keep, k_batch, v_batch, k_stride,
    v_stride, bias_stride, mask_stride, first_k, row0, query0, key0, queries, keys, shift, left,
    right, scale, softcap, keep_stride, pages_number, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr,
    STEP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Update the softmax's numerator and denominator with BK more keys.

    Both become NaN if the page is outside the cache.
    """
    place = first_k + key0
    if pages is not None:
        page = tl.load(pages + key0 // PAGE).to(tl.int64)
        exists = (page >= 0) & (page < pages_number)
        page, scale = tl.where(exists, page, 0), tl.where(exists, scale, float("nan"))
        k, v = k + page * k_batch, v + page * v_batch
        place = key0 % PAGE
    b_k = load_rows(k, k_stride, place, keys - key0, D, BD, BK, MASKED)
    b_v = load_rows(v, v_stride, place, keys - key0, DV, BDV, BK, MASKED)
    scores, _ = scores_of(
        b_q, b_k, bias, mask, bias_stride, mask_stride, query0, key0, queries, keys, shift, left,
        right, scale, softcap, BQ, BK, STEP, LEFT, RIGHT, CAPPED, MASKED,
    )  # fmt: skip
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    faded = tl.exp(highest - higher)
    weight = weight * faded + tl.sum(weights, 1)
    if keep is not None:
        weights = weights * load_keep(keep, keep_stride, row0, queries - query0, key0, BQ, BK)
    more = tl.dot(weights.to(b_v.dtype), b_v, input_precision="ieee")
    return total * faded[:, None] + more, weight, higher


@triton.jit(
    do_not_specialize=[
        "scale", "softcap", "left", "right", "keep_stride", "kept_scale", "number", "across",
        "heads", "queries", "keys", "pages_stride", "pages_number", "sinks_stride",
        "bias_batch", "bias_head", "bias_stride", "mask_batch", "mask_head", "mask_stride",
    ]
)  # fmt: skip
def forward_kernel(
    q, k, v, bias, mask, keep, sinks, table, starts_q, starts_k, lengths_k, pages, out, lse,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, bias_batch,
    bias_head, bias_stride, mask_batch, mask_head, mask_stride, out_batch, out_head, out_stride,
    pages_stride, pages_number, sinks_stride, scale, softcap, left, right, keep_stride, kept_scale,
    number, across, heads, queries, keys, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr,
    STEP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BQ queries of one head.

    If STEP > 1, a position has STEP rows, one per query head of a group. Sinks are then [heads,
    rows of a sequence].
    """
    row = tl.arange(0, BQ)
    for item in range(tl.program_id(0), number * heads, tl.num_programs(0)):
        block, head = item // heads, item % heads
        sequence, within, batch, first_q, lq, first_k, lk = find(
            block, table, number, across, starts_q, starts_k, lengths_k, queries, keys
        )
        query0 = within * BQ
        rows = lq - query0
        shift = 0
        if BOTTOM_RIGHT:
            shift = lk - lq // STEP
        lk = tl.where(rows > 0, lk, 0)
        if keep is not None:  # keys without dropout bits are skipped
            lk = tl.minimum(lk, keep_stride * 8)
        from_k = of_head(k, batch, head // GROUP, k_batch, k_head)
        from_v = of_head(v, batch, head // GROUP, v_batch, v_head)
        of_pages, of_bias, of_mask = pages, bias, mask
        if pages is not None:
            from_k = of_head(k, 0, head // GROUP, k_batch, k_head)
            from_v = of_head(v, 0, head // GROUP, v_batch, v_head)
            of_pages = pages + tl.cast(sequence, tl.int64) * pages_stride
        if bias is not None:
            of_bias = of_head(bias, batch, head, bias_batch, bias_head)
        if mask is not None:
            of_mask = of_head(mask, batch, head, mask_batch, mask_head)
        last = (tl.minimum(query0 + BQ, lq) - 1) // STEP
        begin, whole, split, end = partners(
            query0 // STEP + shift, last + shift, left, right, lk, BK, LEFT, RIGHT, mask is None
        )
        from_q = of_head(q, batch, head, q_batch, q_head)
        b_q = load_rows(from_q, q_stride, first_q + query0, rows, D, BD, BQ)
        total = tl.zeros((BQ, BDV), tl.float32)
        highest = tl.zeros((BQ,), tl.float32) + LOWEST
        weight = tl.zeros((BQ,), tl.float32)
        if sinks is not None:
            if STEP > 1:
                given = tl.minimum(rows, sinks_stride - query0)
                highest = tl.load(
                    sinks + head * sinks_stride + query0 + row, mask=row < given, other=0.0
                )
            else:
                highest = tl.zeros((BQ,), tl.float32) + tl.load(sinks + head)
            weight += 1.0
        row0 = tl.cast(batch * heads + head, tl.int64) * queries + first_q + query0
        if mask is None:
            for key0 in range(whole * BK, split * BK, BK):
                total, weight, highest = _absorb(
                    total, weight, highest, b_q, from_k, from_v, of_bias, None, of_pages, keep,
                    k_batch, v_batch, k_stride, v_stride, bias_stride, mask_stride, first_k, row0,
                    query0, key0, lq, lk, shift, left, right, scale, softcap, keep_stride,
                    pages_number, D, DV, BD, BDV, BQ, BK, PAGE, STEP, LEFT, RIGHT, CAPPED, False,
                )  # fmt: skip
        for edge in range(begin, end - (split - whole)):
            key0 = edge_block(edge, whole, split) * BK
            total, weight, highest = _absorb(
                total, weight, highest, b_q, from_k, from_v, of_bias, of_mask, of_pages, keep,
                k_batch, v_batch, k_stride, v_stride, bias_stride, mask_stride, first_k, row0,
                query0, key0, lq, lk, shift, left, right, scale, softcap, keep_stride,
                pages_number, D, DV, BD, BDV, BQ, BK, PAGE, STEP, LEFT, RIGHT, CAPPED, True,
            )  # fmt: skip
        some = tl.where(weight > 0.0, weight, 1.0)
        if keep is not None:
            total = total * kept_scale
        to = of_head(out, batch, head, out_batch, out_head)
        store_rows(to, total / some[:, None], out_stride, first_q + query0, rows, DV, BDV, BQ)
        tl.store(lse + row0 + row, highest + tl.log(weight), mask=row < rows)
