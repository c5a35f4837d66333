"""Attention by blocks of queries in fp32 on the CPU.

Used for calls that torch's flash attention does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from npu_ops.core import make, rng
from npu_ops.ops.attention.arguments import Rule
from npu_ops.ops.attention.reference import keep_mask, weighted

_SCORES = 1 << 20  # scores per block: 4 MiB, which fits the cache


class Pairs(NamedTuple):
    """Optional tensors that apply to pairs of a query and a key, see `arguments.Extra`.

    rows: int64, shape of lse: number of each row, for dropout's random numbers.
    """

    bias: torch.Tensor | None
    mask: torch.Tensor | None
    rows: torch.Tensor | None
    rng_state: torch.Tensor | None


class Block(NamedTuple):
    """A block of queries, and the range of keys that its queries may attend to."""

    first: int
    end: int
    key: int
    key_end: int

    def rows(self, x):
        return x[:, :, self.first : self.end]

    def columns(self, x):
        return x[:, :, self.key : self.key_end]

    def pairs(self, x):
        """Return the block of a bias or mask, which may have one row for all queries."""
        x = x if x.shape[2] == 1 else self.rows(x)
        return x[..., self.key : self.key_end]


def forward(q, k, v, pairs: Pairs, rule: Rule, out, lse) -> None:
    """Write `out` and `lse` (without sinks)."""
    _forward(q, k, v, pairs, rule, out, lse, _times)
    if not all_finite(out):
        _forward(q, k, v, pairs, rule, out, lse, _times_of_part)


def backward(
    grad_out, grad_lse, out, lse, q, k, v, pairs: Pairs, rule: Rule,
    grad_q, grad_k, grad_v, grad_bias,
) -> None:  # fmt: skip
    """Write grad_q, grad_k and grad_v, and add to grad_bias."""
    given = grad_out, grad_lse, out, lse, q, k, v, pairs, rule, grad_q, grad_k, grad_v
    before = None if grad_bias is None else grad_bias.clone()
    _backward(*given, grad_bias, _times)
    if not all_finite(grad_q, grad_k, grad_v):
        if grad_bias is not None:
            grad_bias.copy_(before)
        _backward(*given, grad_bias, _times_of_part)


def all_finite(*tensors) -> bool:
    """Return whether no element is NaN or infinite. Also False if a sum overflows.

    Masked pairs have weight 0. If a result is not finite, 0 times NaN or infinity may have reached
    it, so callers compute again with `_times_of_part`, which leaves masked pairs out.
    """
    return all(math.isfinite(_sum(x)) for x in tensors)


def _sum(x) -> float:
    """Return the sum of x, which is finite only if all elements are.

    fp16 is summed in fp32, or the sum could overflow. bf16 has the range of fp32 already.
    """
    return x.sum(dtype=torch.float32 if x.dtype == torch.float16 else x.dtype).item()


def _forward(q, k, v, pairs: Pairs, rule: Rule, out, lse, times) -> None:
    k, v = k.float(), v.float()
    for block in _blocks(q, k, rule):
        to, to_lse = block.rows(out), block.rows(lse)
        scores, _ = _scores(block, q, k, pairs, rule)
        log_sum = scores.logsumexp(-1)
        weights = _dropped(_weights(scores, log_sum), block, pairs, rule)
        to.copy_(times(weights, block.columns(v), scores))
        to_lse.copy_(log_sum)


def _backward(
    grad_out, grad_lse, out, lse, q, k, v, pairs: Pairs, rule: Rule, grad_q, grad_k, grad_v,
    grad_bias, times,
) -> None:  # fmt: skip
    k, v = k.float(), v.float()
    grad_k_sum, grad_v_sum = torch.zeros_like(k), torch.zeros_like(v)
    exact = times is _times_of_part
    for block in _blocks(q, k, rule):
        mine_k, mine_v = block.columns(k), block.columns(v)
        grad = block.rows(grad_out).float()
        delta = (grad * block.rows(out).float()).sum(-1)
        delta = delta if grad_lse is None else delta - block.rows(grad_lse)
        scores, slope = _scores(block, q, k, pairs, rule)
        weights = _weights(scores, block.rows(lse))
        weights = _of_part(weights, scores) if exact else weights
        dropped = _dropped(weights, block, pairs, rule)
        block.columns(grad_v_sum).add_(_transposed_times(dropped, grad, mine_v, scores, times))
        grad_weights = _dropped(_times(grad, mine_v.mT), block, pairs, rule)
        grad_scores = weights * (grad_weights - delta[..., None])
        grad_scores = _of_part(grad_scores, scores) if exact else grad_scores
        if grad_bias is not None:
            to = block.pairs(grad_bias)
            to.add_(grad_scores.sum_to_size(to.shape))
        grad_scores = grad_scores * slope * rule.scale
        grad_scores = _of_part(grad_scores, scores) if exact else grad_scores
        block.rows(grad_q).copy_(times(grad_scores, mine_k, scores))
        mine_q = block.rows(q).float()
        block.columns(grad_k_sum).add_(
            _transposed_times(grad_scores, mine_q, mine_k, scores, times)
        )
    grad_k.copy_(grad_k_sum)
    grad_v.copy_(grad_v_sum)


def _blocks(q, k, rule: Rule) -> Iterator[Block]:
    queries, keys = q.shape[2], k.shape[2]
    width = keys
    if rule.window_left >= 0 and rule.window_right >= 0:
        width = min(keys, rule.window_left + rule.window_right + 1)
    size = max(16, min(256, _SCORES // (q.shape[0] * q.shape[1] * width)))
    yield from blocks(queries, keys, size, rule)


def blocks(queries: int, keys: int, size: int, rule: Rule) -> Iterator[Block]:
    """Yield blocks of `size` queries, with the keys in the windows of their queries."""
    shift = keys - queries if rule.bottom_right else 0
    for first in range(0, queries, size):
        end = min(first + size, queries)
        low = first + shift - rule.window_left if rule.window_left >= 0 else 0
        high = end + shift + rule.window_right if rule.window_right >= 0 else keys
        low, high = (min(max(n, 0), keys) for n in (low, high))
        yield Block(first, end, low, max(low, high))


def in_window(block: Block, shift: int, rule: Rule):
    """Return a block's window mask, bool `[queries, keys]`; query i's diagonal is key i + shift."""
    key = make.counted(block.key, block.key_end)
    ahead = key - make.counted(block.first, block.end)[:, None] - shift
    inside = torch.ones_like(ahead, dtype=torch.bool)
    if rule.window_left >= 0:
        inside &= ahead >= -rule.window_left
    if rule.window_right >= 0:
        inside &= ahead <= rule.window_right
    return inside


def _scores(block: Block, q, k, pairs: Pairs, rule: Rule):
    """Return the scores, -inf for masked pairs, and the derivative of the soft cap."""
    scores = _times(block.rows(q).float() * rule.scale, block.columns(k).mT)
    slope = 1.0
    if rule.softcap:
        bent = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * bent, 1 - bent * bent
    if pairs.bias is not None:
        bias = block.pairs(pairs.bias)
        scores = (scores + bias).masked_fill_(bias == -torch.inf, -torch.inf)
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


def _times(x, y, scores=None):
    """Return x @ y; adjacent query heads share a head of y."""
    return (_folded(x, y) @ y).unflatten(2, (x.shape[1] // y.shape[1], -1)).flatten(1, 2)


def _times_of_part(x, y, scores):
    """Return x @ y as `_times` does, but leave out masked pairs: their scores are -inf."""
    product = weighted(_folded(x, y), _folded(scores != -torch.inf, y), y)
    return product.unflatten(2, (x.shape[1] // y.shape[1], -1)).flatten(1, 2)


def _transposed_times(x, y, like, scores, times):
    """Return x^T @ y, summed over the query heads that share a head of `like`."""
    x, y, scores = (_folded(t, like) for t in (x, y, scores))
    return times(x.mT, y, scores.mT)


def _folded(x, like):
    """Fold the query heads that share a head of `like` into rows: `[batch, heads, rows, ..]`."""
    return x.unflatten(1, (-1, x.shape[1] // like.shape[1])).flatten(2, 3)


def _of_part(x, scores):
    """Set masked pairs to 0, even if they are NaN."""
    return x.masked_fill(scores == -torch.inf, 0)
