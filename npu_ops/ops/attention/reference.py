"""Reference of attention: computes every pair of a query and a key, in fp32 (fp64 if q is).

Tensors are in normal form (arguments.py): batch, heads, tokens, head dimension.
"""

from __future__ import annotations

import torch

from npu_ops.core import lengths, make, rng
from npu_ops.ops.attention.arguments import Extra, Rule

_TILE = 128  # keys that share 16 Philox calls


def compute_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attention(q, k, v, extra: Extra, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and lse, the log of the softmax's denominator.

    Computes softmax(scale q k^T, capped, plus bias) v over the unmasked keys. A query without a key
    gets an output of 0 and an lse of -inf (or its sink).

    Returns:
        out `[B, N, Sq, Dv]` and lse `[B, N, Sq]`, both fp32 (fp64 if q is).
    """
    pairs = Pairs(q, k, v, extra, rule)
    lse = pairs.scores.logsumexp(-1)
    if extra.sinks is not None:
        lse = torch.logaddexp(lse, extra.sinks[:, None].expand_as(lse))
    out = weighted(pairs.dropped(pairs.weights(lse)), pairs.part, pairs.v)
    return _without_nobodys(extra.cu_seqlens_q, out, lse)


def attention_backward(grad_out, grad_lse, out, lse, q, k, v, extra: Extra, rule: Rule):
    """Return the gradients of q, k, v, bias (in its own shape) and sinks; fp32, or fp64 if q is."""
    pairs = Pairs(q, k, v, extra, rule)
    wide = compute_dtype(q)
    (grad_out,) = _without_nobodys(extra.cu_seqlens_q, grad_out.to(wide))
    if grad_lse is not None:
        (grad_lse,) = _without_nobodys(extra.cu_seqlens_q, grad_lse)
    weights = pairs.weights(lse)
    delta = (grad_out * out.to(wide)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    grad_weights = pairs.dropped(grad_out @ pairs.v.mT)
    grad_scores = weights * (grad_weights - delta[..., None])
    grad_scores = grad_scores.masked_fill(~pairs.part, 0)
    grad_bias = None if extra.bias is None else grad_scores.sum_to_size(extra.bias.shape)
    grad_sinks = None
    if extra.sinks is not None:
        grad_sinks = -((extra.sinks[:, None] - lse).exp() * delta).sum((0, 2))
    grad_product = (grad_scores * pairs.slope * rule.scale).masked_fill(~pairs.part, 0)
    grad_q = weighted(grad_product, pairs.part, pairs.k)
    grad_k = weighted(grad_product.mT, pairs.part.mT, pairs.q)
    grad_v = weighted(pairs.dropped(weights).mT, pairs.part.mT, grad_out)
    (grad_q,) = _without_nobodys(extra.cu_seqlens_q, grad_q)
    of_keys = _per_group(grad_k, k), _per_group(grad_v, v)
    of_keys = _without_nobodys(extra.cu_seqlens_k, *of_keys)
    return grad_q, *of_keys, grad_bias, grad_sinks


def _without_nobodys(starts, *rows):
    """Set the tokens after the last sequence to 0, in tensors `[1, heads, tokens, ...]`.

    If starts (cu_seqlens) are invalid, set all tokens to NaN.
    """
    found = lengths.without_nobodys(starts, *(x.transpose(1, 2) for x in rows))
    return tuple(x.transpose(1, 2) for x in found)


def weighted(weights, part, x):
    """Return weights @ x without letting masked rows of x turn results into NaN.

    A plain matrix product would compute 0 times inf or NaN for them.

    part: bool, False for masked pairs. weights: same shape, 0 for masked pairs.
    """
    finite = x.isfinite()
    if x.device.type == "cpu" and finite.all():
        return weights @ x
    product = weights @ x.where(finite, 0)
    sign = x.where(x.isinf(), 0).sign()  # infinite elements as 1 or -1, others 0
    part = part.to(x.dtype)
    numbers, infinite = part @ x.isnan().to(x.dtype), part @ sign.abs()
    total = weights.sign() @ sign
    limit = torch.where(total.abs() == infinite, total * torch.inf, torch.nan)
    product = torch.where(infinite > 0, product + limit, product)
    return product.masked_fill(numbers > 0, torch.nan)


class Pairs:
    """The scores of every query and key, -inf for masked pairs.

    part: bool, False for masked pairs, also those with a bias of -inf.
    slope: derivative of the soft cap.
    k and v are repeated for each query head.
    """

    def __init__(self, q, k, v, extra: Extra, rule: Rule):
        wide, group = compute_dtype(q), q.shape[1] // k.shape[1]
        if extra.block_table is not None:
            packed = extra.cu_seqlens_q is not None
            k, v = (from_blocks(x, extra.block_table, packed) for x in (k, v))
        self.positions = Positions(q.shape[2], k.shape[2], extra, q.device)
        self.q = q.to(wide)
        self.k, self.v = (
            x.to(wide).masked_fill(self.positions.missing, 0).repeat_interleave(group, 1)
            for x in (k, v)
        )
        product = self.q @ self.k.mT * rule.scale
        capped = rule.softcap * torch.tanh(product / rule.softcap) if rule.softcap else product
        self.slope = 1 - (capped / rule.softcap) ** 2 if rule.softcap else 1.0
        scores = capped if extra.bias is None else capped + extra.bias
        part = self.positions.takes_part(rule)
        part = part if extra.mask is None else part & extra.mask
        if extra.bias is not None:
            part = part & (extra.bias != -torch.inf)
        self.scores = scores.masked_fill(~part, -torch.inf)
        self.part = part.expand_as(scores)
        self.p, self.state = rule.dropout_p, extra.rng_state

    def weights(self, lse):
        """Return the softmax weights; 0 for a query without a key, whose lse is -inf."""
        weights = (self.scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()
        return weights.masked_fill(~self.part, 0)  # also if lse is NaN

    def dropped(self, weights):
        if not self.p:
            return weights
        batch, heads, queries, _ = weights.shape
        row = make.counted(batch * heads * queries, device=weights.device)
        keep = keep_mask(
            row.view(batch, heads, queries), self.positions.longest, self.p, self.state
        )
        return weights * keep[..., self.positions.key] * rng.scale(self.p)


class Positions:
    """For each query and key: its sequence, and its position in the sequence."""

    def __init__(self, queries: int, keys: int, extra: Extra, device):
        token_q, token_k = (make.counted(n, device=device) for n in (queries, keys))
        self.longest, starts = keys, extra.cu_seqlens_q
        if starts is None:  # one sequence per batch entry
            self.query, self.key, self.same = token_q, token_k, True
            self.queries, self.keys = queries, keys
            if extra.seqlens_k is not None:
                self.keys = extra.seqlens_k.view(-1, 1, 1, 1)
            self.missing = self.key[:, None] >= self.keys  # such keys may hold anything
            return
        # Tokens after the end of the last sequence become a sequence of their own.
        starts = _with_end(starts, queries)
        of_q = (torch.searchsorted(starts, token_q, right=True) - 1).clamp(0, len(starts) - 2)
        self.query, self.queries = token_q - starts[of_q], starts.diff()[of_q, None]
        if extra.block_table is None:
            starts = _with_end(extra.cu_seqlens_k, keys)
            lengths = starts.diff()
            of_k = (torch.searchsorted(starts, token_k, right=True) - 1).clamp(0, len(lengths) - 1)
            self.key = token_k - starts[of_k]
        else:  # paged: equally many rows per sequence, of which the first ones are keys
            sequences = len(extra.seqlens_k)
            self.longest = keys // sequences
            lengths = torch.nn.functional.pad(extra.seqlens_k, (0, 1))
            of_k, self.key = token_k // self.longest, token_k % self.longest
        self.same, self.keys = of_q[:, None] == of_k, lengths[of_q, None]
        self.missing = (self.key >= lengths[of_k])[:, None]

    def takes_part(self, rule: Rule):
        """Return which pairs are not masked: bool `[B or 1, 1, queries, keys]`."""
        shift = self.keys - self.queries if rule.bottom_right else 0
        # distance of a key from the diagonal; > 0 is after it
        ahead = self.key - self.query[:, None] - shift
        part = (self.key < self.keys) & self.same & torch.ones_like(ahead, dtype=torch.bool)
        if rule.window_left >= 0:
            part = part & (ahead >= -rule.window_left)
        if rule.window_right >= 0:
            part = part & (ahead <= rule.window_right)
        return part


def _with_end(starts, tokens: int):
    """Append the number of tokens to `starts`."""
    return torch.nn.functional.pad(starts, (0, 1), value=tokens)


def from_blocks(cache, block_table, packed: bool):
    """Gather each sequence's blocks as `[n, heads, keys, dim]`; packed: as a batch of one."""
    blocks = cache[block_table.clamp(0, cache.shape[0] - 1).long()]  # [n, blocks, heads, size, dim]
    keys = blocks.transpose(1, 2).flatten(2, 3)
    return keys.transpose(0, 1).flatten(1, 2)[None] if packed else keys


def keep_mask(row: torch.Tensor, columns: int, p: float, state: torch.Tensor) -> torch.Tensor:
    """Return which weights dropout keeps: bool, row's shape by `columns` keys of a sequence.

    Column c takes the 16-bit draw c % 128 // 16 of Philox(counter=(c // 128 * 16 + c % 16, row,
    offset), key=seed). So any 128 columns share 16 Philox calls, and no draw is wasted.
    """
    seed, offset = state.unbind()
    tiles = -(-columns // _TILE)
    calls = make.counted(tiles * 16, device=row.device)
    low, high = (lambda word: word & 0xFFFFFFFF), (lambda word: (word >> 32) & 0xFFFFFFFF)
    counter = (calls, row[..., None] & 0xFFFFFFFF, low(offset), high(offset))
    words = rng.philox4x32(counter, (low(seed), high(seed)))
    draws = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-2)
    draws = draws.unflatten(-1, (tiles, 16)).transpose(-3, -2)  # [.., tiles, 8, 16]
    return draws.flatten(-3)[..., :columns] >= rng.threshold(p)


def _per_group(x, like):
    """Sum over the query heads that share a key head."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2)
