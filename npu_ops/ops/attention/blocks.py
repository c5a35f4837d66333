"""Attention by blocks of queries, in fp32, on the CPU: what torch's flash attention has not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from npu_ops.core import make, rng
from npu_ops.ops.attention.arguments import Rule
from npu_ops.ops.attention.reference import keep_mask

_SCORES = 1 << 20  # of a block: 4 MiB, which stays in the cache


class Pairs(NamedTuple):
    """What belongs to pairs of queries and keys: see `arguments.Extra`; rows is for dropout."""

    bias: torch.Tensor | None
    mask: torch.Tensor | None
    rows: torch.Tensor | None
    rng_state: torch.Tensor | None


class Block(NamedTuple):
    """Some queries, and all keys that may take part for one of them."""

    first: int
    end: int
    key: int
    key_end: int

    def rows(self, x):
        return x[:, :, self.first : self.end]

    def columns(self, x):
        return x[:, :, self.key : self.key_end]

    def pairs(self, x):
        """Of a tensor that may have one row for all queries."""
        x = x if x.shape[2] == 1 else self.rows(x)
        return x[..., self.key : self.key_end]


def forward(q, k, v, pairs: Pairs, rule: Rule, out, lse) -> None:
    """Write out and lse (without sinks)."""
    k, v = k.float(), v.float()
    for block in _blocks(q, k, rule):
        to, to_lse = block.rows(out), block.rows(lse)
        scores, _ = _scores(block, q, k, pairs, rule)
        log_sum = scores.logsumexp(-1)
        weights = _dropped(_weights(scores, log_sum), block, pairs, rule)
        to.copy_(_times(weights, block.columns(v)))
        to_lse.copy_(log_sum)


def backward(dout, dlse, out, lse, q, k, v, pairs: Pairs, rule: Rule, dq, dk, dv, dbias) -> None:
    """Write dq, dk and dv, and add to dbias."""
    k, v = k.float(), v.float()
    dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
    for block in _blocks(q, k, rule):
        mine_k, mine_v = block.columns(k), block.columns(v)
        grad = block.rows(dout).float()
        delta = (grad * block.rows(out).float()).sum(-1)
        delta = delta if dlse is None else delta - block.rows(dlse)
        scores, slope = _scores(block, q, k, pairs, rule)
        weights = _weights(scores, block.rows(lse))
        block.columns(dv_sum).add_(
            _transposed_times(_dropped(weights, block, pairs, rule), grad, mine_v)
        )
        dweights = _dropped(_times(grad, mine_v.mT), block, pairs, rule)
        dscores = weights * (dweights - delta[..., None])
        if dbias is not None:
            to = block.pairs(dbias)
            to.add_(dscores.sum_to_size(to.shape))
        dscores = dscores * slope * rule.scale
        block.rows(dq).copy_(_times(dscores, mine_k))
        block.columns(dk_sum).add_(_transposed_times(dscores, block.rows(q).float(), mine_k))
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)


def _blocks(q, k, rule: Rule) -> Iterator[Block]:
    queries, keys = q.shape[2], k.shape[2]
    width = keys
    if rule.window_left >= 0 and rule.window_right >= 0:
        width = min(keys, rule.window_left + rule.window_right + 1)
    size = max(16, min(256, _SCORES // (q.shape[0] * q.shape[1] * width)))
    yield from blocks(queries, keys, size, rule)


def blocks(queries: int, keys: int, size: int, rule: Rule) -> Iterator[Block]:
    """Blocks of `size` queries, with the keys in the windows of any of them."""
    shift = keys - queries if rule.bottom_right else 0
    for first in range(0, queries, size):
        end = min(first + size, queries)
        low = first + shift - rule.window_left if rule.window_left >= 0 else 0
        high = end + shift + rule.window_right if rule.window_right >= 0 else keys
        low, high = (min(max(n, 0), keys) for n in (low, high))
        yield Block(first, end, low, max(low, high))


def in_window(block: Block, shift: int, rule: Rule):
    """bool `[queries, keys]` of a block; the diagonal is `shift` keys ahead."""
    key = make.counted(block.key, block.key_end)
    ahead = key - make.counted(block.first, block.end)[:, None] - shift
    inside = torch.ones_like(ahead, dtype=torch.bool)
    if rule.window_left >= 0:
        inside &= ahead >= -rule.window_left
    if rule.window_right >= 0:
        inside &= ahead <= rule.window_right
    return inside


def _scores(block: Block, q, k, pairs: Pairs, rule: Rule):
    """The scores, -inf where a key does not take part, and the derivative of the soft cap."""
    scores = _times(block.rows(q).float() * rule.scale, block.columns(k).mT)
    slope = 1.0
    if rule.softcap:
        bent = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * bent, 1 - bent * bent
    if pairs.bias is not None:
        scores = scores + block.pairs(pairs.bias)
    if pairs.mask is not None:
        scores = scores.masked_fill(~block.pairs(pairs.mask), -torch.inf)
    if rule.window_left >= 0 or rule.window_right >= 0:
        shift = k.shape[2] - q.shape[2] if rule.bottom_right else 0
        scores = scores.masked_fill(~in_window(block, shift, rule), -torch.inf)
    return scores, slope


def _weights(scores, lse):
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()


def _dropped(weights, block: Block, pairs: Pairs, rule: Rule):
    if not rule.dropout_p:
        return weights
    keep = keep_mask(block.rows(pairs.rows), block.key_end, rule.dropout_p, pairs.rng_state)
    return weights * keep[..., block.key :] * rng.scale(rule.dropout_p)


def _times(x, y):
    """x @ y, where query heads in a row share a head of y."""
    group = x.shape[1] // y.shape[1]
    folded = x.unflatten(1, (-1, group)).flatten(2, 3)
    return (folded @ y).unflatten(2, (group, -1)).flatten(1, 2)


def _transposed_times(x, y, like):
    """x^T @ y, summed over the query heads that share a head of `like`."""
    group = x.shape[1] // like.shape[1]
    x, y = (t.unflatten(1, (-1, group)).flatten(2, 3) for t in (x, y))
    return x.mT @ y
