"""Attention on the CPU, by the fastest method that supports each sequence.

Native code computes short sequences and decoding steps with a cache. torch's flash attention
computes long sequences. blocks.py computes all other calls. Memory is linear in tokens: sequences
are not padded, and no mask of all pairs is made.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from npu_ops.core import env, indices, make
from npu_ops.ops.attention import blocks, decode, short
from npu_ops.ops.attention.arguments import Extra, Rule
from npu_ops.ops.attention.routing import operator_of

_WINDOW = 256  # queries per call of flash attention, if the call has a window
# From this many keys on, torch's flash attention never processes keys one at a time, see
# `_may_hide_nan`.
_FEW = 128
# (dtype, whether backward) -> numbers of queries for which fp32 is faster. Measured on a CPU with 4
# to 32 heads of head_dim 72 to 256, relative to fp32: fp16 takes up to twice as long, its backward
# 10 to 20 times as long; bf16's backward 1.1 to 3 times as long.
_FASTER_IN_FP32 = {
    (torch.float16, False): range(33, sys.maxsize),
    (torch.float16, True): range(3, sys.maxsize),
    (torch.bfloat16, True): range(3, 129),
}
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Piece(NamedTuple):
    """Sequences of equal lengths, computed as one batch.

    The fields are functions that select the piece's part of a tensor in normal form (arguments.py):
    queries: of a tensor with q's tokens. keys: of k or v. pairs: of a bias or mask.
    Each returns a view, but for paged keys a copy.
    """

    queries: Callable[[torch.Tensor], torch.Tensor]
    keys: Callable[[torch.Tensor], torch.Tensor]
    pairs: Callable[[torch.Tensor], torch.Tensor]


def attention(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    """Write `out` and `lse`."""
    if decode.serves(q, extra, rule):
        decode.forward(q, k, v, extra, rule, out, lse)
    elif env.settings.consistent and decode.serves_each(q, extra, rule):
        _each_query(q, k, v, extra, rule, out, lse)
    elif env.settings.consistent and decode.serves_masked(q, extra, rule):
        decode.forward_masked(q, k, v, extra.mask, rule, out, lse)
    elif short.serves_all(q, k, v, extra, rule):
        short.forward(q, k, v, rule, out, lse)
    else:
        _by_piece(q, k, v, extra, rule, out, lse)
    if extra.sinks is not None:
        _add_sinks(extra.sinks, out, lse)
    if extra.cu_seqlens_q is not None:
        end = int(extra.cu_seqlens_q[-1])
        for x in (out, lse):  # tokens after the last sequence
            x[:, :, end:].zero_()


def _each_query(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    for piece in pieces(q, k, extra):
        to = piece.queries(out), piece.queries(lse)
        decode.forward_each(piece.queries(q), piece.keys(k), piece.keys(v), rule, *to)


def _by_piece(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    rows = _rows(lse, rule)
    by_blocks = operator_of(q, k, v, extra, rule) != "torch flash attention"
    for piece in pieces(q, k, extra):
        mine = piece.queries(q), piece.keys(k), piece.keys(v)
        to = piece.queries(out), piece.queries(lse)
        if not mine[0].numel():
            continue
        call = _of_piece(piece, extra, rows)
        if not mine[1].shape[2]:
            to[0].zero_()
            to[1].copy_(to[1].new_full((), -torch.inf))
        elif by_blocks:
            blocks.forward(*mine, call, rule, *to)
        elif short.serves(*mine[:2], call.mask, rule):
            short.forward(*mine, rule, *to)
        else:
            _forward(*mine, call.mask, rule, *to, own=to[0] is out)


def attention_backward(
    grad_out, grad_lse, out, lse, q, k, v, extra: Extra, rule: Rule,
    grad_q, grad_k, grad_v, grad_bias, grad_sinks,
) -> None:  # fmt: skip
    """Write the gradients; grad_bias and grad_sinks may be None."""
    gradients = grad_q, grad_k, grad_v
    if grad_lse is None and short.serves_all(q, k, v, extra, rule, *gradients):
        return short.backward(grad_out, lse, q, k, v, rule, *gradients)
    operator = operator_of(q, k, v, extra, rule, grad_lse is not None)
    by_blocks = operator != "torch flash attention"
    # Gradients of tokens outside of all pieces, and of keys that no query attends to, stay 0.
    # grad_bias is a sum over pieces.
    packed = extra.cu_seqlens_q is not None
    for gradient in (grad_q if packed else None, grad_k, grad_v, grad_bias):
        if gradient is not None:
            gradient.zero_()
    rows = _rows(lse, rule)
    for piece in pieces(q, k, extra):
        mine = piece.queries(q), piece.keys(k), piece.keys(v)
        saved = [None if x is None else piece.queries(x) for x in (grad_out, grad_lse, out, lse)]
        to = piece.queries(grad_q), piece.keys(grad_k), piece.keys(grad_v)
        call = _of_piece(piece, extra, rows)
        if not mine[0].numel() or not mine[1].numel():
            to[0].zero_()
        elif by_blocks:
            pairs = None if grad_bias is None else piece.pairs(grad_bias)
            blocks.backward(*saved, *mine, call, rule, *to, pairs)
        elif short.serves(*mine[:2], call.mask, rule, *to):
            short.backward(saved[0], saved[3], *mine, rule, *to)
        else:
            own = to[0] is grad_q
            _backward(saved[0], *saved[2:], *mine, call.mask, rule, *to, own=own)
    if grad_sinks is not None:
        delta = (grad_out.float() * out.float()).sum(-1)
        delta = delta if grad_lse is None else delta - grad_lse
        shares = (extra.sinks[:, None] - lse).exp() * delta
        if packed:
            shares = shares[..., : int(extra.cu_seqlens_q[-1])]
        grad_sinks.copy_(-shares.sum((0, 2)))


def _rows(lse, rule: Rule):
    """Return the index of each row, in lse's shape, for dropout's draws; None without dropout."""
    return make.counted(lse.numel()).view(lse.shape) if rule.dropout_p else None


def _of_piece(piece: Piece, extra: Extra, rows) -> blocks.Pairs:
    one = [None if x is None else piece.pairs(x) for x in (extra.bias, extra.mask)]
    return blocks.Pairs(*one, None if rows is None else piece.queries(rows), extra.rng_state)


# Sequences of a call


def pieces(q, k, extra: Extra) -> Iterator[Piece]:
    """Yield the pieces of a call. Checks all index values before it yields the first one."""
    if extra.block_table is not None:
        yield from _paged(q, k, extra)
    elif extra.cu_seqlens_q is not None:
        yield from _packed(q, k, extra)
    elif extra.seqlens_k is not None:
        yield from _padded(k, extra)
    else:
        yield Piece(*[lambda x: x] * 3)


def _starts_of_queries(q, extra: Extra) -> list[int]:
    return indices.starts_of("cu_seqlens_q", extra.cu_seqlens_q, q.shape[2])


def _packed(q, k, extra: Extra) -> Iterator[Piece]:
    """Yield packed sequences; adjacent ones of equal lengths form a batch."""
    starts_q = starts_k = _starts_of_queries(q, extra)
    if extra.cu_seqlens_k is not extra.cu_seqlens_q or k.shape[2] != q.shape[2]:
        starts_k = indices.starts_of("cu_seqlens_k", extra.cu_seqlens_k, k.shape[2])
    lengths = zip(_lengths(starts_q), _lengths(starts_k), strict=True)
    at_q = at_k = 0
    for (queries, keys), run in itertools.groupby(lengths):
        count = len(list(run))
        yield Piece(_folded(at_q, count, queries), _folded(at_k, count, keys), lambda x: x)
        at_q, at_k = at_q + count * queries, at_k + count * keys


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts)]


def _folded(begin: int, count: int, length: int):
    """Return a function that views packed `[1, heads, tokens, ..]` as `[count, heads,
    length, ..]`."""

    def view(x):  # as_strided: narrow, unflatten and transpose take five times as long
        _, heads, _, *rest = x.shape
        _, head, token, *steps = x.stride()
        size, strides = (count, heads, length, *rest), (length * token, head, token, *steps)
        return x.as_strided(size, strides, x.storage_offset() + begin * token)

    return view


def _padded(k, extra: Extra) -> Iterator[Piece]:
    for b, length in enumerate(indices.within("seqlens_k", extra.seqlens_k, 0, k.shape[2])):
        own = slice(b, b + 1)
        yield Piece(
            lambda x, own=own: x[own],
            lambda x, own=own, length=length: x[own, :, :length],
            lambda x, own=own, length=length: (x if x.shape[0] == 1 else x[own])[..., :length],
        )


def _paged(q, k, extra: Extra) -> Iterator[Piece]:
    table, size = extra.block_table, k.shape[2]
    lengths = indices.within("seqlens_k", extra.seqlens_k, 0, table.shape[1] * size)
    starts = None if extra.cu_seqlens_q is None else _starts_of_queries(q, extra)
    blocks = [table[b, : -(-length // size)] for b, length in enumerate(lengths)]
    indices.within("block_table", torch.cat(blocks), 0, k.shape[0] - 1)
    for b, length in enumerate(lengths):
        if starts is None:
            queries = lambda x, b=b: x[b : b + 1]  # noqa: E731
        else:
            queries = _folded(starts[b], 1, starts[b + 1] - starts[b])
        yield Piece(queries, _gathered(blocks[b].long(), length), lambda x: x)


def _gathered(used, length: int):
    """Return a function that gathers a sequence's keys from its blocks: `[1, heads, length,
    dim]`."""

    def keys(cache):
        return cache[used].transpose(0, 1).flatten(1, 2)[None, :, :length]

    return keys


# torch's flash attention


class Span(NamedTuple):
    """A range of queries and keys for one call of torch's flash attention.

    causal: use torch's causal mask, whose diagonal starts at the first key.
    mask: bool mask, or None.
    more: the previous span has the same queries with other keys, so merge the results.
    """

    block: blocks.Block
    causal: bool = False
    mask: torch.Tensor | None = None
    more: bool = False


def _spans(queries: int, keys: int, mask, rule: Rule) -> Iterator[Span]:
    """Yield the spans to compute. A query that is in no span attends to no key."""
    shift = keys - queries if rule.bottom_right else 0
    if rule.window_left >= 0 or rule.window_right > 0:
        for block in blocks.blocks(queries, keys, _WINDOW, rule):
            if block.key < block.key_end:
                yield Span(block, mask=blocks.in_window(block, shift, rule))
    elif rule.window_right < 0 or (queries == 1 and shift >= 0 and rule.bottom_right):
        yield Span(blocks.Block(0, queries, 0, keys), mask=mask)
    elif shift <= 0:
        if shift > -queries:
            yield Span(blocks.Block(-shift, queries, 0, keys), causal=True)
    else:
        yield Span(blocks.Block(0, queries, 0, shift))
        yield Span(blocks.Block(0, queries, shift, keys), causal=True, more=True)


def _forward(q, k, v, mask, rule: Rule, out, lse, own: bool) -> None:
    """Write `out` and `lse` with flash attention.

    own: out is not a view, so its memory may be replaced.
    """
    spans = list(_spans(q.shape[2], k.shape[2], mask, rule))
    whole = _is_whole(spans, q)
    everything = whole and spans[0].block.key_end == k.shape[2]
    if not whole:
        out.zero_()
        lse.fill_(-torch.inf)
    masked = hidden = False
    for block, causal, part, more in spans:
        masked |= causal or part is not None
        rows = _all if whole else block.rows
        columns = _all if everything else block.columns
        mine = _as_fast(rows(q), columns(k), columns(v), backward=False)
        added = _added(part, mine[0])
        flash = _one_query if added is None and not causal and _shares_keys(*mine) else _flash
        found, log_sum = flash(*mine, 0.0, causal, attn_mask=added, scale=rule.scale)
        to, to_lse = rows(out), rows(lse)
        if part is not None:  # a query may have no key
            nothing = ~part.any(-1).expand(to_lse.shape)
            found = found.masked_fill(nothing[..., None], 0)
            log_sum = log_sum.masked_fill(nothing, -torch.inf)
        if more:
            hidden = hidden or _may_hide_nan(log_sum, k)
            _merge(to, to_lse, found, log_sum)
            continue
        _put(out if whole else to, found, own and whole)
        to_lse.copy_(log_sum)
        hidden = hidden or _may_hide_nan(to_lse, k)  # log_sum is not contiguous, so slower to read
    # Compute again by blocks, without masked pairs: flash attention adds -inf to masked scores even
    # if they are NaN, and multiplies masked values by 0. It may also have hidden a row of NaN.
    if hidden or (masked and not blocks.all_finite(out)):
        blocks.forward(q, k, v, blocks.Pairs(None, mask, None, None), rule, out, lse)


def _is_whole(spans: list[Span], q) -> bool:
    """Return whether there is one span, with all queries and starting at the first key."""
    return len(spans) == 1 and spans[0].block[:3] == (0, q.shape[2], 0)


def _all(x):
    return x


def _as_fast(*tensors: torch.Tensor, backward: bool) -> Sequence[torch.Tensor]:
    """Return the tensors, or fp32 copies if flash attention is faster in fp32. q comes first."""
    q = tensors[0]
    slow = q.shape[2] in _FASTER_IN_FP32.get((q.dtype, backward), ())
    if slow or (backward and q.dtype == torch.bfloat16 and not _multiplies_bf16()):
        return [x.float() for x in tensors]
    return tensors


@functools.cache
def _multiplies_bf16() -> bool:
    """Return whether torch has bf16 matrix products for this CPU (on x86 from AVX-512 on).

    Without them a bf16 product takes 5 to 100 times as long as in fp32. This matters only for the
    backward: flash attention's forward multiplies in fp32.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _shares_keys(q, k, v) -> bool:
    """Return whether there is one query, and several query heads share a key head."""
    return q.shape[2] == 1 and q.shape[1] > k.shape[1]


def _one_query(q, k, v, *settings, **named):
    """Run `_flash` for a query that sees all keys.

    Query heads that share a key head become queries of one head, so keys are read once for all.
    """
    of_one = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
    if q.dtype == torch.float16:  # fp16 takes twice as long as fp32
        of_one, k, v = of_one.float(), k.float(), v.float()
    found, log_sum = _flash(of_one, k, v, *settings, **named)
    return found.flatten(1, 2).unsqueeze(2), log_sum.flatten(1, 2).unsqueeze(2)


def _put(to, found, own: bool) -> None:
    """Write `found` to `to`.

    own: `to` may take over the memory of `found`. If the strides agree, nothing is copied then:
    touching new memory is slower than computing a short sequence.
    """
    own = own and to.dtype == found.dtype
    if own and to.shape == found.shape and to.stride() == found.stride():
        to.set_(found)
    else:
        to.copy_(found)


def _may_hide_nan(log_sum, k) -> bool:
    """Return whether a row of scores may be all NaN.

    If flash attention processes keys one at a time, it mistakes such a row for one without keys,
    and returns 0 for its output and log-sum.
    """
    if k.shape[2] >= _FEW or not log_sum.numel():
        return False
    least, most = log_sum.abs().aminmax()
    return least.item() == 0 or (most.item() == torch.inf and log_sum.max().item() == torch.inf)


def _backward(
    grad_out, out, lse, q, k, v, mask, rule: Rule, grad_q, grad_k, grad_v, own: bool
) -> None:  # fmt: skip
    """Write the gradients of all spans.

    The softmax runs over all spans, so each call of flash attention gets the output and the lse of
    all spans.

    own: the gradients are not views, so their memory may be replaced.
    """
    finite_lse = lse.masked_fill(lse == -torch.inf, 0)  # so that weights are 0, not exp(-inf + inf)
    spans = list(_spans(q.shape[2], k.shape[2], mask, rule))
    whole = _is_whole(spans, q) and spans[0].block.key_end == k.shape[2]
    if not whole:
        grad_q.zero_()
    masked = False
    overlap = rule.window_left >= 0 or rule.window_right > 0
    sums = [
        torch.zeros(x.shape, dtype=torch.float32, device="cpu") if overlap else x
        for x in (grad_k, grad_v)
    ]
    for block, causal, part, more in spans:
        masked |= causal or part is not None
        rows, columns = (_all, _all) if whole else (block.rows, block.columns)
        mine = rows(q), columns(k), columns(v), rows(grad_out), rows(out)
        fast_q, fast_k, fast_v, fast_grad, fast_out = _as_fast(*mine, backward=True)
        found = _flash_backward(
            fast_grad, fast_q, fast_k, fast_v, fast_out, rows(finite_lse), 0.0, causal,
            attn_mask=_added(part, fast_q), scale=rule.scale,
        )  # fmt: skip
        if whole and not overlap:
            for to, gradient in zip((grad_q, grad_k, grad_v), found, strict=True):
                _put(to, gradient, own)
            break
        rows(grad_q).add_(found[0]) if more else rows(grad_q).copy_(found[0])
        for to, gradient in zip(sums, found[1:], strict=True):
            columns(to).add_(gradient) if overlap else columns(to).copy_(gradient)
    if overlap:
        grad_k.copy_(sums[0])
        grad_v.copy_(sums[1])
    if masked and not blocks.all_finite(grad_q, grad_k, grad_v):
        pairs = blocks.Pairs(None, mask, None, None)
        blocks.backward(
            grad_out, None, out, lse, q, k, v, pairs, rule, grad_q, grad_k, grad_v, None
        )


def _added(mask, q):
    """Convert a mask to flash attention's additive form."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device="cpu").masked_fill_(~mask, -torch.inf)


def _merge(out, lse, found, log_sum) -> None:
    """Merge the result for further keys into out and lse."""
    both = torch.logaddexp(lse, log_sum)
    mine, theirs = ((x - both).exp()[..., None] for x in (lse, log_sum))
    out.copy_(out * mine + found * theirs)
    lse.copy_(both)


def _add_sinks(sinks, out, lse) -> None:
    """Add an extra score to each head's denominator."""
    both = torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    out.copy_(out * (lse - both).exp()[..., None])
    lse.copy_(both)
