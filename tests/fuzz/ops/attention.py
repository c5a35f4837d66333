"""Fuzzer target of attention."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fuzz.formula import Out, drawn, need, spans
from fuzz.memory import FORMS
from fuzz.target import DTYPES, INDEX, NAN, NO, Drawn, Target, tensor

# Expected results


def softmax_rows(q, k, v, *, scale, left, right, shift, softcap, bias, mask, sinks, keep, p):
    """Return out `[N, Sq, Dv]` and lse `[N, Sq]` of one sequence; q, k and v are `[N, S, D]`."""
    queries, keys = q.shape[1], k.shape[1]
    scores = torch.einsum("nqd,nkd->nqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - shift
    part = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        part &= ahead >= -left
    if right >= 0:
        part &= ahead <= right
    part = part if mask is None else part & mask
    scores = scores.masked_fill(~part, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, queries, 1)], -1)
    top = (
        scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    )
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    nothing = total == 0
    lse = (torch.where(nothing, 1.0, total).log() + top).masked_fill(nothing, -torch.inf)
    weights = (weights / torch.where(nothing, 1.0, total))[..., :keys]
    if keep is not None:
        weights = weights * keep / (1 - drawn(p))
    v = v[:, None].masked_fill(~part[..., None], 0.0)  # unseen values may be NaN
    return torch.einsum("nqk,nqkd->nqd", weights, v), lse[..., 0]


def in_heads(x, layout, heads):
    """Return a dense layout as `[B, N, S, D]`, and TND as `[1, N, T, D]`."""
    if layout in ("BSH", "SBH"):
        x, layout = x.unflatten(2, (heads, -1)), layout[:2] + "ND"
    if layout == "TND":
        x, layout = x[None], "BSND"
    return x.permute([layout.index(axis) for axis in "BNSD"])


def from_heads(x, layout):
    """Undo `in_heads`."""
    order = {"BSH": "BSND", "SBH": "SBND", "TND": "BSND"}.get(layout, layout)
    x = x.permute(["BNSD".index(axis) for axis in order])
    x = x[0] if layout == "TND" else x
    return x.flatten(2) if layout in ("BSH", "SBH") else x


def cache_keys(cache, layout, blocks, length, heads):
    """Return `[N, length, D]` from a paged cache; block numbers past the length are ignored."""
    if cache.dim() == 3:
        cache = cache.unflatten(2, (heads, -1))
    cache = cache if layout != "BNSD" else cache.transpose(1, 2)  # [blocks, size, N, D]
    size = cache.shape[1]
    used = blocks[: -(-length // size) if length else 0].tolist()
    need(all(0 <= block < len(cache) for block in used), "block_table")
    rows = [cache[used[j // size], j % size] for j in range(length)]
    keys = torch.stack(rows) if rows else cache.new_zeros(0, *cache.shape[2:])
    return keys.transpose(0, 1)


def attention(
    q, k, v, layout="BSND", num_heads=None, num_key_value_heads=None, is_causal=False,
    causal_alignment="bottom_right", window=None, attn_mask=None, bias=None, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqlens_k=None, block_table=None,
    scale=None, softcap=None, sinks=None, dropout_p=0.0, deterministic=False, return_lse=False,
    generator=None, keep=None,
):  # fmt: skip
    key_heads = num_key_value_heads or num_heads
    wide_q = in_heads(q, layout, num_heads)
    paged = block_table is not None
    need(not (paged and any(x.requires_grad for x in (q, k, v))), "block_table")
    if not paged:
        wide_k, wide_v = (in_heads(x, layout, key_heads) for x in (k, v))
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    if layout == "TND":
        of_q = spans(cu_seqlens_q, q.shape[0], "cu_seqlens_q")
        longest = max(end - begin for begin, end in of_q)
        need(max_seqlen_q is None or longest <= max_seqlen_q, "max_seqlen_q")
    else:
        of_q = [(0, wide_q.shape[2])] * wide_q.shape[0]
    if paged:
        lengths = seqlens_k.tolist()
        size = k.shape[1] if k.dim() == 3 or layout != "BNSD" else k.shape[2]
        most = block_table.shape[1] * size
        need(all(0 <= length <= most for length in lengths), "seqlens_k")
        pairs = [
            tuple(cache_keys(x, layout, blocks, length, key_heads) for x in (k, v))
            for blocks, length in zip(block_table, lengths, strict=True)
        ]
    elif layout == "TND":
        starts = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        of_k = spans(starts, k.shape[0], "cu_seqlens_k")
        longest = max(end - begin for begin, end in of_k)
        need(max_seqlen_k is None or longest <= max_seqlen_k, "max_seqlen_k")
        pairs = [tuple(x[0, :, b:e] for x in (wide_k, wide_v)) for b, e in of_k]
    else:
        lengths = [wide_k.shape[2]] * len(of_q) if seqlens_k is None else seqlens_k.tolist()
        need(all(0 <= length <= wide_k.shape[2] for length in lengths), "seqlens_k")
        pairs = [
            tuple(x[n, :, :length] for x in (wide_k, wide_v)) for n, length in enumerate(lengths)
        ]
    heads, found = wide_q.shape[1], []
    for n, ((begin, end), (keys, values)) in enumerate(zip(of_q, pairs, strict=True)):
        mine = wide_q[0 if layout == "TND" else n, :, begin:end]
        count = keys.shape[1]
        dense = [None, None]
        for i, x in enumerate((attn_mask, bias)):
            if x is not None:
                x = x if x.dim() == 4 else x[None, None]
                x = x.expand(x.shape[0], x.shape[1], x.shape[2], wide_k.shape[2])
                dense[i] = x[n if x.shape[0] > 1 else 0, ..., :count]
        group = heads // max(keys.shape[0], 1)
        found.append(softmax_rows(
            mine, *(x.repeat_interleave(group, 0) for x in (keys, values)),
            scale=q_dim_scale(wide_q, scale), left=left, right=right,
            shift=count - (end - begin) if causal_alignment == "bottom_right" else 0,
            softcap=softcap, mask=dense[0], bias=dense[1], sinks=sinks, p=dropout_p,
            keep=None if keep is None else keep[n],
        ))  # fmt: skip
    dim = (
        v.shape[-1]
        if layout not in ("BSH", "SBH") and v.dim() == 4 or layout == "TND"
        else (v.shape[-1] // key_heads)
    )
    if paged and v.dim() == 3:
        dim = v.shape[-1] // key_heads
    if layout == "TND":  # may have tokens after the last sequence
        behind = q.shape[0] - of_q[-1][1]
        out = torch.cat([*(o for o, _ in found), wide_q.new_zeros(heads, behind, dim)], 1)[None]
        lse = torch.cat([*(s for _, s in found), wide_q.new_zeros(heads, behind)], 1)
    else:
        shape = wide_q.shape[:3]
        out = torch.stack([o for o, _ in found]) if found else wide_q.new_zeros(*shape, dim)
        lse = torch.stack([s for _, s in found]) if found else wide_q.new_zeros(shape)
    outs = [Out(from_heads(out, layout))]
    return [*outs, Out(lse)] if return_lse else outs


def q_dim_scale(q, scale):
    return q.shape[3] ** -0.5 if scale is None else scale


# Calls to draw


ATTENTION = {
    "layout": ("BSND", "BNSD", "SBND", "TND", "BSH", "SBH"), "batch": (1, 2, 3),
    "queries": (3, 1, 2, 5, 17, 0), "keys": (3, 1, 2, 5, 17, 0), "heads": (1, 2),
    "group": (1, 2, 3), "dim": (8, 4, 1, 16, 72), "value_dim": (None, 4, 16),
    "is_causal": NO, "alignment": ("bottom_right", "top_left"),
    "window": Drawn(
        None, st.none() | st.lists(st.integers(-1, 4), min_size=2, max_size=2)
    ),
    "mask": (None, "pairs", "batch", "heads", "keys"),
    "bias": (None, "pairs", "batch", "heads", "keys"), "wide_bias": NO,
    "lengths": Drawn([[3, 3]], st.lists(
        st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=3
    )),
    "own_keys": NO, "longest": NO, "padded": NO, "paged": NO, "block_size": (2, 1, 4, 16),
    "folded_cache": NO, "index": INDEX, "scale": (None, 1.0, 0.3, 0.0, -0.5),
    "softcap": (None, 2.0), "sinks": (None, "float32", "same"), "p": (0.0, 0.0, 0.5, 0.1),
    "lse": NO, "deterministic": NO, "dtype": DTYPES, "hide": NO,
}  # fmt: skip


def make_attention(s, draw):
    layout, dtype, dim = s["layout"], s["dtype"], s["dim"]
    heads, key_heads = s["heads"] * s["group"], s["heads"]
    value_dim, p = s["value_dim"] or dim, s["p"]
    wide = "float64" if dtype == "float64" else "float32"
    arguments, index = {}, s["index"]
    batch, queries, keys = s["batch"], s["queries"], s["keys"]
    packed_q, paged = layout == "TND", s["paged"]
    if packed_q:
        pairs = s["lengths"]
        batch = len(pairs)
        queries = sum(q for q, _ in pairs)
        of_k = [k for _, k in pairs] if s["own_keys"] and not paged else [q for q, _ in pairs]
        keys = sum(of_k)
        arguments["cu_seqlens_q"] = draw.starts([q for q, _ in pairs], index)
        if s["own_keys"] and not paged:
            arguments["cu_seqlens_k"] = draw.starts(of_k, index)
        if s["longest"]:
            arguments["max_seqlen_q"] = max(q for q, _ in pairs)
            if not paged:
                arguments["max_seqlen_k"] = max(of_k)
    if p:  # with identity values the output shows the weights
        value_dim = max(keys, 1) if not paged else dim
        p = 0.0 if paged or queries == 0 or keys == 0 else p
    if paged:
        size = s["block_size"]
        per_sequence = -(-max(keys, 1) // size) if not packed_q else 2
        blocks = batch * per_sequence + 1
        table = tensor(draw.distinct(batch * per_sequence, blocks), "int32")
        lengths = draw.integers(per_sequence * size + 1, batch, dtype=index)
        if layout == "BNSD":
            shape = (blocks, key_heads, size)
            k, v = (draw.normal(*shape, n, dtype=dtype) for n in (dim, value_dim))
        else:
            shape = (blocks, size, key_heads)
            k, v = (draw.normal(*shape, n, dtype=dtype) for n in (dim, value_dim))
            if layout in ("BSH", "SBH") or s["folded_cache"]:
                k, v = k.flatten(2), v.flatten(2)
                arguments["num_key_value_heads"] = key_heads
        table = table.view(batch, per_sequence)
        if s["hide"]:
            hide_blocks(k, v, table, lengths.tolist(), size, layout)
        arguments |= {"block_table": table, "seqlens_k": lengths}
    else:
        k = heads_in(draw.normal(batch, key_heads, keys, dim, dtype=dtype), layout, packed_q)
        v = heads_in(draw.normal(batch, key_heads, keys, value_dim, dtype=dtype), layout, packed_q)
        if p:
            v = identity(v, layout, key_heads, value_dim, arguments)
    q = heads_in(draw.normal(batch, heads, queries, dim, dtype=dtype), layout, packed_q)
    if layout in ("BSH", "SBH"):
        arguments |= {"num_heads": heads, "num_key_value_heads": key_heads}
    dense = not packed_q and not paged
    if dense and s["padded"]:
        lengths = draw.integers(keys + 1, batch, dtype=index)
        arguments["seqlens_k"] = lengths
        if s["hide"] and not p:
            for n, length in enumerate(lengths.tolist()):
                for x in (k, v):
                    batch_first = x if layout in ("BSND", "BNSD", "BSH") else x.transpose(0, 1)
                    tokens = batch_first[n] if layout != "BNSD" else batch_first[n].transpose(0, 1)
                    tokens[length:] = NAN
    shapes = {
        "pairs": (queries, keys), "batch": (batch, 1, queries, keys), "heads": (1, heads, 1, keys),
        "keys": (batch, 1, 1, keys),
    }  # fmt: skip
    limited = s["is_causal"] or s["window"]
    if dense and s["mask"] and not limited:
        arguments["attn_mask"] = draw.uniform(0, 1, *shapes[s["mask"]]) < 0.6
    if dense and s["bias"]:
        arguments["bias"] = draw.normal(*shapes[s["bias"]], dtype=wide if s["wide_bias"] else dtype)
    if s["sinks"]:
        arguments["sinks"] = draw.normal(heads, dtype=dtype if s["sinks"] == "same" else wide)
    return {
        "q": q, "k": k, "v": v, "layout": layout, "is_causal": s["is_causal"],
        "causal_alignment": s["alignment"], "window": s["window"] and tuple(s["window"]),
        "scale": s["scale"], "softcap": s["softcap"], "dropout_p": p, "return_lse": s["lse"],
        "deterministic": s["deterministic"],
    } | arguments  # fmt: skip


def heads_in(x, layout, packed_q):
    """Return `[B, N, S, D]` contiguous in a layout; packed tokens are in the first batch entry."""
    if packed_q:
        return x[0].transpose(0, 1).contiguous() if len(x) else x
    return from_heads(x, layout).contiguous()


def identity(v, layout, heads, dim, arguments):
    """Return one-hot values, so that the output is the attention weights.

    The value of key j, counted within its sequence, is 1 at j.
    """
    keys = v.shape[0] if layout == "TND" else dim
    where = torch.arange(keys, device="cpu")
    if layout == "TND":
        starts = arguments.get("cu_seqlens_k", arguments["cu_seqlens_q"]).long()
        where = where - starts[torch.searchsorted(starts, where, right=True) - 1]
    rows = torch.nn.functional.one_hot(where, dim).to(v.dtype)
    wide = in_heads(v, layout, heads)
    return from_heads(rows.expand(*wide.shape[:2], -1, -1), layout).contiguous()


def hide_blocks(k, v, table, lengths, size, layout):
    """Fill cache rows that no sequence owns with NaN, and unused block numbers with -7."""
    used = set()
    for blocks, length in zip(table, lengths, strict=True):
        used |= {(int(blocks[j // size]), j % size) for j in range(length)}
        blocks[-(-length // size) :] = -7
    for x in (k, v):
        rows = x.transpose(1, 2) if layout == "BNSD" else x
        for block in range(len(rows)):
            for row in range(size):
                if (block, row) not in used:
                    rows[block, row] = NAN


def forms(name, s):
    """Return the forms that an argument may have, None for any.

    One-hot values (see `identity`) and hidden rows differ within an argument, so it cannot be
    expanded from one copy.
    """
    own = (name == "v" and s["p"]) or (name in ("k", "v", "block_table") and s["hide"])
    return tuple(form for form in FORMS if form != "expanded") if own else None


def largest_product(arguments):
    """Return a bound on the products of v and the output's gradient.

    Softmax's gradient subtracts the weighted mean of a row of these products. With one key, only
    rounding errors remain. They reach the gradients of q, k and the bias; that of the bias has no
    factor scale.
    """
    q, k, v = (arguments[name].detach() for name in "qkv")
    if not (q.numel() and k.numel() and v.numel()):
        return 1.0
    largest = [float(x.nan_to_num().abs().max()) for x in (q, k, v)]
    scale = 1.0 if arguments["scale"] is None else abs(arguments["scale"])
    return max(1.0, max(1.0, scale * max(largest[:2])) * largest[2] * v.shape[-1] ** 0.5)


def dropped_weights(arguments, outputs):
    """Return the weights that attention's dropout kept: bool `[N, Sq, Sk]` per sequence."""
    if not arguments["dropout_p"]:
        return None
    layout, starts = arguments["layout"], arguments.get("cu_seqlens_q")
    wide = in_heads(outputs[0].double(), layout, arguments.get("num_heads"))
    if layout != "TND":
        lengths = arguments.get("seqlens_k")
        lengths = [wide.shape[3]] * len(wide) if lengths is None else lengths.tolist()
        return [x[..., :length] != 0 for x, length in zip(wide, lengths, strict=True)]
    ends = starts.tolist()
    of_k = arguments.get("cu_seqlens_k")
    lengths = (starts if of_k is None else of_k).diff().tolist()
    return [
        wide[0, :, b:e, :length] != 0 for b, e, length in zip(ends, ends[1:], lengths, strict=False)
    ]


TARGETS = {
    "attention": Target(
        attention,
        ATTENTION, make_attention, ("q", "k", "v", "bias", "sinks"),
        indices=("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table"),
        roundings=32, loose=True, drops=dropped_weights, forms=forms, met=largest_product,
    ),
}  # fmt: skip
