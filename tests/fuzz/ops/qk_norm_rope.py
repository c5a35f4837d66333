"""Fuzzer targets of qk_norm_rope: split, norms of q and k heads, rotation."""

from __future__ import annotations

import torch

from fuzz.formula import Out, need
from fuzz.ops.rotary import full_width, pick_axes, rotated, sections
from fuzz.target import DTYPES, INDEX, NAN, NO, TOKENS, Target

# Expected results


def qk_norm_rope(
    qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps=1e-6, zero_centered=False,
    gated=False, mrope_section=None, section_layout=None, pair_layout="half", rotary_dim=None,
    copy_rest=True,
):  # fmt: skip
    """Compute one head at a time."""
    width = rotary_dim or cos.shape[-1]
    if mrope_section is not None:
        cos, sin = (
            pick_axes(table, mrope_section, section_layout, pair_layout) for table in (cos, sin)
        )
    cos, sin = (full_width(table, width, pair_layout) for table in (cos, sin))
    dim = len(q_weight)
    heads = [qkv[..., n * dim : (n + 1) * dim] for n in range(qkv.shape[-1] // dim)]

    def turned(x, weight):
        scale = weight + 1 if zero_centered else weight
        y = x / ((x * x).sum(-1, keepdim=True) / dim + eps).sqrt() * scale
        return rotated(y, cos, sin, pair_layout, False)

    step = 2 if gated else 1
    queries, rest = heads[: step * num_heads], heads[step * num_heads :]
    q = torch.stack([turned(x, q_weight) for x in queries[::step]], -2)
    k = torch.stack([turned(x, k_weight) for x in rest[:num_kv_heads]], -2)
    v = torch.stack(rest[num_kv_heads:], -2)
    return [Out(q), Out(k), Out(v), Out(torch.stack(queries[1::2], -2) if gated else None)]


def qk_norm_rope_cached(
    positions, qkv, q_weight, k_weight, cos_sin_cache, num_heads, num_kv_heads, eps=1e-6,
    zero_centered=False, gated=False, mrope_section=None, section_layout=None, pair_layout="half",
    rotary_dim=None, copy_rest=True,
):  # fmt: skip
    rows = positions.long()
    need(bool(((rows >= 0) & (rows < len(cos_sin_cache))).all()), "positions")
    if mrope_section is not None and rows.dim() < qkv.dim():
        rows = rows.expand(3, *rows.shape)
    tables = (table[rows] for table in cos_sin_cache.chunk(2, -1))
    return qk_norm_rope(
        qkv, q_weight, k_weight, *tables, num_heads, num_kv_heads, eps, zero_centered, gated,
        mrope_section, section_layout, pair_layout, cos_sin_cache.shape[1],
    )  # fmt: skip


# Calls to draw


def make_projection(s, draw):
    tokens = (s["tokens"],) if s["batch"] is None else (s["batch"], s["tokens"])
    dim, queries = s["dim"], s["heads"] * (2 if s["gated"] else 1)
    width = (queries + 2 * s["kv_heads"]) * dim
    arguments = {
        "qkv": draw.normal(*tokens, width, dtype=s["dtype"]),
        "q_weight": draw.normal(dim, dtype=s["weight"]),
        "k_weight": draw.normal(dim, dtype=s["k_weight"]), "num_heads": s["heads"],
        "num_kv_heads": s["kv_heads"], "eps": s["eps"], "gated": s["gated"],
        "zero_centered": s["centered"], "pair_layout": s["pair_layout"], "copy_rest": s["copy"],
    }  # fmt: skip
    if s["section_layout"]:
        section = sections(s, rotary_width(s) // 2)
        arguments |= {"mrope_section": section, "section_layout": s["section_layout"]}
    return tokens, arguments


def rotary_width(s):
    return max(2, s["dim"] - s["part"])


def make_by_table(s, draw):
    tokens, arguments = make_projection(s, draw)
    if s["batch"] and s["one_table"]:
        tokens = 1, s["tokens"]
    axes = (3,) if s["section_layout"] else ()
    width = rotary_width(s) // (2 if s["half"] else 1)
    tables = {n: draw.normal(*axes, *tokens, width, dtype=s["table"]) for n in ("cos", "sin")}
    return arguments | tables | {"rotary_dim": rotary_width(s)}


def make_by_position(s, draw):
    tokens, arguments = make_projection(s, draw)
    axes = (3,) if s["section_layout"] and not s["text"] else ()
    positions = draw.integers(6, *axes, *tokens, dtype=s["index"])
    cache = draw.normal(6, rotary_width(s), dtype=s["table"])
    if s["hide"]:
        cache[sorted(set(range(6)) - set(positions.flatten().tolist()))] = NAN
    return arguments | {"positions": positions, "cos_sin_cache": cache}


PROJECTION = dict(
    batch=(None, 1, 2, 0), tokens=TOKENS, heads=(1, 2, 3), kv_heads=(1, 2),
    dim=(4, 2, 6, 8, 16, 36), part=(0, 2), dtype=DTYPES, weight=DTYPES, k_weight=DTYPES,
    table=DTYPES, eps=(1e-6, 1e-3), gated=NO, centered=NO, pair_layout=("half", "interleaved"),
    section_layout=(None, "chunked", "interleaved"), copy=(True, False),
)  # fmt: skip
WRT = ("qkv", "q_weight", "k_weight")

TARGETS = {
    "qk_norm_rope": Target(
        qk_norm_rope, dict(one_table=NO, half=NO, **PROJECTION), make_by_table, WRT,
    ),
    "qk_norm_rope_cached": Target(
        qk_norm_rope_cached, dict(index=INDEX, text=NO, hide=NO, **PROJECTION), make_by_position,
        WRT, indices=("positions",),
    ),
}  # fmt: skip
