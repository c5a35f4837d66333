"""Fuzzer targets of rotary embedding: plain, and multimodal with three axes."""

from __future__ import annotations

import torch

from fuzz.formula import Out, need, spans
from fuzz.target import DTYPES, INDEX, LENGTHS, NAN, NO, TOKENS, Target

# Expected results


def rotated(x, cos, sin, pair_layout, inverse):
    """Rotate x `[..., D]` by full-width cos and sin `[..., R]`, ordered as the pairs."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    if pair_layout == "half":
        turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
    else:
        turned = torch.stack([-part[..., 1::2], part[..., 0::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * (-sin if inverse else sin), rest], -1)


def full_width(table, width, pair_layout):
    """Expand a half-width table, which has one angle per pair."""
    if table.shape[-1] == width:
        return table
    return (
        torch.cat([table, table], -1) if pair_layout == "half" else table.repeat_interleave(2, -1)
    )


def over_heads(table, layout):
    """View a table `[B, S, R]` so that it broadcasts with a tensor of `layout`."""
    match layout:
        case "TND":
            return table[0, :, None]
        case "SBND":
            return table.transpose(0, 1)[:, :, None]
        case "BSND":
            return table[:, :, None]
    return table[:, None]


def rotate_both(q, k, cos, sin, layout, pair_layout, inverse, inplace):
    """Rotate q and k by cos and sin of each token, `[B or 1, S, R]`."""
    cos, sin = (over_heads(table, layout) for table in (cos, sin))
    return [
        Out(None if x is None else rotated(x, cos, sin, pair_layout, inverse), name)
        for x, name in (
            (q, "q" if inplace else None),
            (k, "k" if inplace and k is not None else None),
        )
    ]


def of_sequences(q, k, rows):
    """Return TND q and k with tokens of no sequence set to 0, and the tokens' table rows `[1, T]`.

    rows: table rows of the tokens of sequences, which come first. Tokens of no sequence get row 0.
    """
    inside = (torch.arange(len(q)) < len(rows))[:, None, None]
    q, k = (x if x is None else torch.where(inside, x, 0.0) for x in (q, k))
    return q, k, torch.tensor([rows + [0] * (len(q) - len(rows))]).long()


def layout_of(q, layout, unsqueeze_dim):
    return layout or ("TND" if q.dim() == 3 else "BNSD" if unsqueeze_dim == 1 else "BSND")


def apply_rotary_pos_emb(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, layout=None, pair_layout="half",
    rotary_dim=None, cu_seqlens=None, inverse=False, inplace=False,
):  # fmt: skip
    layout, width = layout_of(q, layout, unsqueeze_dim), rotary_dim or cos.shape[-1]
    tables = [full_width(table, width, pair_layout) for table in (cos, sin)]
    rows = None
    if cu_seqlens is not None:
        pieces = spans(cu_seqlens, q.shape[0], "cu_seqlens")
        need(all(end - begin <= len(cos) for begin, end in pieces), "cu_seqlens")
        rows = [t for begin, end in pieces for t in range(end - begin)]
        q, k, rows = of_sequences(q, k, rows)
    elif position_ids is not None and cos.dim() == 2:
        rows = position_ids.long()
        rows = rows if rows.dim() == 2 else rows[None]
        inside = bool(((rows >= 0) & (rows < len(cos))).all())
        need(inside, "position_ids")
    if rows is not None:  # the table may be empty if no token has a row
        none = tables[0].new_zeros(1, tables[0].shape[-1])
        tables = [torch.cat([table, none])[rows] for table in tables]
    tables = [table if table.dim() == 3 else table[None] for table in tables]
    return rotate_both(q, k, *tables, layout, pair_layout, inverse, inplace)


def apply_rotary_pos_emb_freqs(
    q, k, freqs, layout="SBND", pair_layout="half", mscale=1.0, cu_seqlens=None, max_seqlen=None,
    cp_size=1, cp_rank=0, inverse=False, inplace=False,
):  # fmt: skip
    cos, sin = (torch.cos(freqs) * mscale, torch.sin(freqs) * mscale)
    tables = [table.squeeze(2).transpose(0, 1) for table in (cos, sin)]
    if cu_seqlens is not None:
        rows, tokens = [], q.shape[0]
        per_token = (
            len(freqs) > max_seqlen if max_seqlen is not None else (len(freqs) == tokens * cp_size)
        )
        pieces = spans(cu_seqlens, tokens * cp_size, "cu_seqlens")
        for begin, end in pieces:
            need(cp_size == 1 or (end - begin) % (2 * cp_size) == 0, "cu_seqlens")
            chunk = (end - begin) // (2 * cp_size)
            own = range(begin, end)
            if cp_size > 1:
                last = 2 * cp_size - 1 - cp_rank
                own = [
                    *range(begin + cp_rank * chunk, begin + (cp_rank + 1) * chunk),
                    *range(begin + last * chunk, begin + (last + 1) * chunk),
                ]
            rows += [t if per_token else t - begin for t in own]
        need(all(row < len(freqs) for row in rows), "cu_seqlens")
        q, k, rows = of_sequences(q, k, rows)
        tables = [table[:, rows[0]] for table in tables]
    else:
        need(cp_size == 1, "cp_size")
    need(0 <= cp_rank < cp_size, "cp_rank")
    return rotate_both(q, k, *tables, layout, pair_layout, inverse, inplace)


def owner(sections, section_layout):
    """Return the axis (0 to 2 for T, H, W) of each frequency."""
    t, h, w = sections
    if section_layout == "chunked":
        return [0] * t + [1] * h + [2] * w
    owners = [0] * (t + h + w)
    for axis, size in ((1, h), (2, w)):
        for n in range(size):
            owners[3 * n + axis] = axis
    return owners


def pick_axes(tables, sections, section_layout, pair_layout):
    """Return `[B, S, W]` from `[3, B, S, W]`: each frequency from its axis."""
    owners = torch.tensor(owner(sections, section_layout)).long()
    if tables.shape[-1] != len(owners):
        owners = full_width(owners, tables.shape[-1], pair_layout)
    return torch.stack([tables[axis, ..., j] for j, axis in enumerate(owners.tolist())], -1)


def apply_multimodal_rotary_pos_emb(
    q, k, cos, sin, mrope_section, unsqueeze_dim=1, section_layout=None, layout=None,
    pair_layout="half", rotary_dim=None, inverse=False, inplace=False,
):  # fmt: skip
    layout = layout_of(q, layout, unsqueeze_dim)
    tables = [table if table.dim() == 4 else table[:, None] for table in (cos, sin)]
    tables = [
        full_width(
            pick_axes(table, mrope_section, section_layout, pair_layout),
            2 * sum(mrope_section), pair_layout,
        )
        for table in tables
    ]  # fmt: skip
    return rotate_both(q, k, *tables, layout, pair_layout, inverse, inplace)


def apply_multimodal_rotary_pos_emb_cached(
    positions, q, k, cos_sin_cache, mrope_section, section_layout, pair_layout="half",
    rotary_dim=None, head_dim=None, inverse=False, inplace=False,
):  # fmt: skip
    rows = positions.long()
    need(bool(((rows >= 0) & (rows < len(cos_sin_cache))).all()), "positions")
    cos, sin = cos_sin_cache.chunk(2, -1)
    tables = [table[rows.expand(3, -1)][:, None] for table in (cos, sin)]
    heads = [x if x is None or x.dim() == 3 else x.unflatten(-1, (-1, head_dim)) for x in (q, k)]
    outs = apply_multimodal_rotary_pos_emb(
        *heads, *tables, mrope_section, section_layout=section_layout, layout="TND",
        pair_layout=pair_layout, inverse=inverse, inplace=inplace,
    )  # fmt: skip
    for out, x in zip(outs, (q, k), strict=True):
        out.value = None if x is None else out.value.reshape(x.shape)
    return outs


# Calls to draw


HEADS = {
    "layout": ("BSND", "SBND", "BNSD", "TND"), "batch": (1, 2, 0), "tokens": TOKENS,
    "heads": (1, 2, 3, 0), "k_heads": (1, None, 2), "head_dim": (4, 2, 6, 8, 16, 36),
    "part": (0, 2), "half": NO, "pair_layout": ("half", "interleaved"), "inverse": NO,
    "inplace": NO, "dtype": DTYPES, "table": DTYPES, "together": (None, "beside", "overlapping"),
    "hide": NO,
}  # fmt: skip


def heads_shape(s, heads, tokens=None):
    sizes = {
        "B": s["batch"], "S": s["tokens"] if tokens is None else tokens, "N": heads,
        "D": s["head_dim"],
    }  # fmt: skip
    sizes["T"] = sizes["S"]
    return [sizes[axis] for axis in s["layout"]]


def make_heads(s, draw, tokens=None):
    """Return q and k: separate, side by side in one storage, or overlapping."""
    q = draw.normal(*heads_shape(s, s["heads"], tokens), dtype=s["dtype"])
    if s["k_heads"] is None:
        return {"q": q, "k": None}
    k = draw.normal(*heads_shape(s, s["k_heads"], tokens), dtype=s["dtype"])
    if not s["together"]:
        return {"q": q, "k": k}
    axis, both = s["layout"].index("N"), s["heads"] + s["k_heads"]
    memory = draw.normal(*heads_shape(s, both, tokens), dtype=s["dtype"])
    first = s["heads"] if s["together"] == "beside" else max(s["heads"] - 1, 0)
    return {
        "q": memory.narrow(axis, 0, s["heads"]), "k": memory.narrow(axis, first, s["k_heads"]),
    }  # fmt: skip


def rotary_width(s):
    return max(2, s["head_dim"] - s["part"])


def make_table(s, draw, *shape):
    """Return cos and sin `[..., W]`; for an inverse, a pair's elements have the same angle."""
    width = rotary_width(s)
    if s["half"]:
        return [draw.normal(*shape, width // 2, dtype=s["table"]) for _ in range(2)]
    if not s["inverse"]:
        return [draw.normal(*shape, width, dtype=s["table"]) for _ in range(2)]
    halves = [draw.normal(*shape, width // 2, dtype=s["table"]) for _ in range(2)]
    return [full_width(half, width, s["pair_layout"]) for half in halves]


def rope_settings(s):
    return {
        "layout": s["layout"], "pair_layout": s["pair_layout"], "inverse": s["inverse"],
        "inplace": s["inplace"],
    }  # fmt: skip


def make_rope(s, draw):
    packing = s["layout"] == "TND" and s["lengths"] is not None
    tokens = sum(s["lengths"]) + s["padding"] if packing else s["tokens"]
    arguments = make_heads(s, draw, tokens)
    batch = 1 if s["layout"] == "TND" else s["batch"]
    rows = {"rotary_dim": rotary_width(s)}
    if packing:
        table = max(s["lengths"]) + s["spare"]
        rows["cu_seqlens"] = draw.starts(s["lengths"], s["index"])
        shape = (table,)
    elif s["positions"] != "none":
        table = s["spare"] + 4
        shape = {"row": (1, tokens), "full": (batch, tokens)}[s["positions"]]
        shape = (tokens,) if s["layout"] == "TND" else shape
        rows["position_ids"] = draw.integers(table, *shape, dtype=s["index"])
        shape = (table,)
    elif s["table_batch"] and s["layout"] != "TND":
        shape = (batch if s["table_batch"] == "full" else 1, tokens)
    else:
        shape = (tokens,)
    cos, sin = make_table(s, draw, *shape)
    if s["hide"] and "position_ids" in rows:
        unused = sorted(set(range(len(cos))) - set(rows["position_ids"].flatten().tolist()))
        cos[unused] = NAN
        sin[unused] = NAN
    return arguments | {"cos": cos, "sin": sin} | rows | rope_settings(s)


def make_freqs(s, draw):
    packing = s["layout"] == "TND" and s["lengths"] is not None
    cp = s["cp"] if packing else 1
    lengths = s["lengths"] if cp == 1 or not packing else [n * 2 * cp for n in s["lengths"]]
    tokens = sum(lengths) // cp + s["padding"] if packing else s["tokens"]
    arguments = make_heads(s, draw, tokens)
    batch = 1 if s["layout"] == "TND" else s["batch"]
    more, rows = {}, tokens
    if packing:
        more = {
            "cu_seqlens": draw.starts(lengths, s["index"]), "cp_size": cp,
            "cp_rank": cp - 1 if s["last_rank"] else 0,
        }  # fmt: skip
        rows = sum(lengths) + s["padding"] * cp if s["per_token"] else max(lengths) + 1
        more["max_seqlen"] = max(lengths) + 1
        if s["per_token"] and rows <= more["max_seqlen"]:
            rows = more["max_seqlen"] + 1
    freqs = draw.normal(
        rows, batch if s["freqs_batch"] else 1, 1, rotary_width(s), dtype=s["table"]
    )
    if s["inverse"]:
        freqs = full_width(freqs[..., : rotary_width(s) // 2], rotary_width(s), s["pair_layout"])
    return arguments | {"freqs": freqs * 3, "mscale": s["mscale"]} | more | rope_settings(s)


def sections(s, frequencies):
    """Return how many frequencies T, H and W have. H and W have at most a third each, because the
    interleaved layout allows no more."""
    h, w = frequencies // 3, frequencies // 4
    return [frequencies - h - w, h, w]


def make_mrope(s, draw):
    arguments = make_heads(s, draw)
    batch = 1 if s["layout"] == "TND" else s["batch"]
    shape = (
        (3, s["tokens"])
        if s["layout"] == "TND"
        else (3, batch if s["table_batch"] == "full" else 1, s["tokens"])
    )
    cos, sin = make_table(s, draw, *shape)
    return arguments | {
        "cos": cos, "sin": sin, "mrope_section": sections(s, rotary_width(s) // 2),
        "section_layout": s["section_layout"], "rotary_dim": rotary_width(s),
    } | rope_settings(s)  # fmt: skip


def make_mrope_cached(s, draw):
    s = s | {"layout": "TND"}
    arguments, table = make_heads(s, draw), 4 + s["spare"]
    shape = (s["tokens"],) if s["text"] else (3, s["tokens"])
    positions = draw.integers(table, *shape, dtype=s["index"])
    cache = draw.normal(table, rotary_width(s), dtype=s["table"])
    if s["hide"]:
        cache[sorted(set(range(table)) - set(positions.flatten().tolist()))] = NAN
    if s["flat"] and not s["together"]:
        flat = {n: x if x is None else x.flatten(1) for n, x in arguments.items()}
        arguments = flat | {"head_dim": s["head_dim"]}
    arguments |= {
        "positions": positions, "cos_sin_cache": cache,
        "mrope_section": sections(s, rotary_width(s) // 2), "section_layout": s["section_layout"],
    }  # fmt: skip
    return arguments | {n: x for n, x in rope_settings(s).items() if n != "layout"}


def in_place(s):
    return ("q", "k") if s["inplace"] else ()


TARGETS = {
    "apply_rotary_pos_emb": Target(
        apply_rotary_pos_emb,
        dict(
            lengths=LENGTHS, index=INDEX, padding=(0, 2), positions=("none", "row", "full"),
            table_batch=(None, "one", "full"), spare=(0, 3), **HEADS,
        ),
        make_rope, ("q", "k"), writes=in_place, indices=("cu_seqlens", "position_ids"),
        roundings=8,
    ),
    "apply_rotary_pos_emb_freqs": Target(
        apply_rotary_pos_emb_freqs,
        dict(
            lengths=LENGTHS, index=INDEX, cp=(1, 2), last_rank=NO, per_token=NO, padding=(0, 2),
            freqs_batch=NO, mscale=(1.0, 0.5), **{**HEADS, "half": (False,)},
        ),
        make_freqs, ("q", "k"), writes=in_place, indices=("cu_seqlens",), roundings=16,
    ),
    "apply_multimodal_rotary_pos_emb": Target(
        apply_multimodal_rotary_pos_emb,
        dict(
            section_layout=("chunked", "interleaved"), table_batch=("one", "full"), **HEADS,
        ),
        make_mrope, ("q", "k"), writes=in_place, roundings=8,
    ),
    "apply_multimodal_rotary_pos_emb_cached": Target(
        apply_multimodal_rotary_pos_emb_cached,
        dict(
            section_layout=("chunked", "interleaved"), index=INDEX, spare=(0, 3), text=NO, flat=NO,
            **{**HEADS, "half": (True,), "layout": ("TND",)},
        ),
        make_mrope_cached, ("q", "k"), writes=in_place, indices=("positions",), roundings=8,
    ),
}  # fmt: skip
