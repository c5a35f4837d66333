"""What the fuzzer calls: each public function's settings, arguments, and what is done with them.

Settings are plain values that hypothesis draws and makes small; `make` turns them and a seed into
the arguments of a call that the docstring allows. Another seed gives other numbers of the same
shapes, also of lengths and indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from fuzz import formulas

SIZES = (1, 2, 3, 5, 8)
TOKENS = (3, 1, 2, 0, 5, 9)
DTYPES = ("float32", "bfloat16", "float16", "float64")
INDEX = ("int64", "int32")
NAN = float("nan")


class Drawn(NamedTuple):
    """A setting's strategy, and the simplest value of it."""

    simplest: object
    strategy: st.SearchStrategy


@dataclasses.dataclass(frozen=True)
class Target:
    """A public function.

    fields: of the settings: all values, the simplest first, or `Drawn`. make: see above.
    wrt: arguments with a gradient. indices: arguments whose values it follows.
    writes: settings -> arguments that it overwrites.
    forms: (argument, settings) -> the forms of memory it may have; None: any.
    roundings: how many an output may have seen, each relative to the largest number; loose: they
        are those of the inputs' dtype, else of fp32.
    drops: (arguments, outputs) -> which elements dropout kept, in the formula's argument `keep`.
    """

    fields: dict
    make: Callable[[dict, Draw], dict]
    wrt: tuple[str, ...] = ()
    writes: Callable[[dict], tuple[str, ...]] = lambda s: ()
    indices: tuple[str, ...] = ()
    forms: Callable[[str, dict], tuple[str, ...] | None] = lambda name, s: None
    roundings: int = 32
    loose: bool = False
    drops: Callable[[dict, list], object] | None = None

    @property
    def settings(self) -> st.SearchStrategy:
        return st.fixed_dictionaries({
            name: field.strategy if isinstance(field, Drawn) else st.sampled_from(field)
            for name, field in self.fields.items()
        })  # fmt: skip

    @property
    def simplest(self) -> dict:
        """The settings that a case need not name."""
        return {name: field[0] for name, field in self.fields.items()}


class Draw:
    """Numbers by a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(self, *shape, dtype="float32"):
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return x.to(getattr(torch, dtype))

    def uniform(self, low, high, *shape, dtype="float32"):
        x = torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return (low + (high - low) * x).to(getattr(torch, dtype))

    def integers(self, below, *shape, dtype="int64"):
        x = torch.randint(max(below, 1), shape, generator=self.generator, device="cpu")
        return x.to(getattr(torch, dtype))

    def shuffled(self, values: list) -> list:
        order = torch.randperm(len(values), generator=self.generator, device="cpu")
        return [values[i] for i in order]

    def starts(self, lengths: list[int], dtype="int64"):
        """The starts of sequences of these lengths in any order, and their end."""
        lengths = torch.tensor([0, *self.shuffled(lengths)], dtype=torch.int64, device="cpu")
        return lengths.cumsum(0).to(getattr(torch, dtype))

    def distinct(self, count: int, below: int) -> list[int]:
        return self.shuffled(list(range(below)))[:count]


def tensor(values, dtype="int64"):
    return torch.tensor(values, dtype=getattr(torch, dtype), device="cpu")


YES, NO = (True, False), (False, True)
LENGTHS = Drawn(None, st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=4))
SHAPE = Drawn([], st.lists(st.sampled_from(TOKENS), max_size=3))


# Norms and gates


def make_l2norm(s, draw):
    dtype = s["output_dtype"]
    return {
        "x": draw.normal(*s["shape"], s["dim"], dtype=s["dtype"]), "eps": s["eps"],
        "output_dtype": dtype and getattr(torch, dtype),
    }  # fmt: skip


def make_rms_norm_gated(s, draw):
    shape, groups = s["shape"], s["groups"]
    dim = s["dim"] * (groups or 1)
    return {
        "x": draw.normal(*shape, dim, dtype=s["dtype"]),
        "weight": draw.normal(dim, dtype=s["weight"]),
        "z": draw.normal(*shape, dim, dtype=s["z"]), "norm_before_gate": s["before"],
        "activation": s["activation"], "group_size": s["dim"] if groups else None, "eps": s["eps"],
    }  # fmt: skip


def make_gdn_gate(s, draw):
    heads, dtype, parameter = s["heads"], s["dtype"], s["parameter"]
    arguments = {
        "a": draw.normal(*s["shape"], heads, dtype=dtype) * s["size"],
        "A_log": draw.normal(heads, dtype=parameter),
        "dt_bias": draw.normal(heads, dtype=parameter) if s["bias"] else None,
        "b": None,
    }  # fmt: skip
    if s["b"]:
        arguments |= {
            "b": draw.normal(*s["shape"], heads, dtype=s["b"]), "allow_neg_eigval": s["neg"],
        }  # fmt: skip
    return arguments


def make_bias_dropout_add(s, draw):
    shape, dtype = [*s["shape"], s["dim"]], s["dtype"]
    result = s["result"] and getattr(torch, s["result"])
    residual = draw.normal(*shape, dtype=dtype if s["inplace"] else s["residual"])
    x = draw.normal(*shape, dtype=dtype)
    if s["p"]:  # what was dropped must show
        x = x.abs() + 1
    bias_shape = {"no": None, "row": shape[-1:], "full": shape}[s["bias"]]
    bias = None if bias_shape is None else draw.uniform(0, 1, *bias_shape, dtype=dtype)
    if s["together"] and s["inplace"] and shape[0] > 1 and x.dim() > 1:
        # x and the residual in one memory, a row apart
        memory = draw.normal(shape[0] + 1, *shape[1:], dtype=dtype)
        x, residual = memory[1:], memory[:-1]
    return {
        "x": x, "bias": bias, "residual": residual, "p": s["p"], "training": s["training"],
        "dtype": None if s["inplace"] else result, "inplace": s["inplace"],
    }  # fmt: skip


def dropped_elements(arguments, outputs):
    """Which elements a bias_dropout_add kept: those that are not the residual."""
    if not (arguments["training"] and arguments["p"]):
        return None
    residual = arguments["residual"]
    bias = 0 if arguments["bias"] is None else arguments["bias"]
    return (outputs[0].double() - residual).abs() > 0.25 * (arguments["x"] + bias).abs()


# Convolution


def packed(s, draw, tokens_name="tokens"):
    """(batch, tokens, cu_seqlens) of settings with "lengths" or "batch" and "tokens"."""
    if s["lengths"] is None:
        return s["batch"], s[tokens_name], None
    return 1, sum(s["lengths"]), draw.starts(s["lengths"], s["index"])


CONV = {
    "batch": (1, 2, 0), "tokens": TOKENS, "lengths": LENGTHS, "index": INDEX, "width": (4, 2, 3),
    "bias": NO, "state": NO, "final": NO, "dtype": DTYPES, "parameter": ("same", "float32"),
    "hide": NO, "broken": NO,
}  # fmt: skip


def conv_arguments(s, draw, channels):
    batch, tokens, starts = packed(s, draw)
    dtype = s["dtype"]
    parameter = dtype if s["parameter"] == "same" else "float32"
    count, state = batch if starts is None else len(starts) - 1, None
    if s["state"]:
        state = draw.normal(count, channels, s["width"], dtype=dtype)
    if s["state"] and s["hide"] and not s["final"]:
        state[..., 0] = NAN
    x = draw.normal(batch, tokens, channels, dtype=dtype)
    if s["broken"] and x.numel():  # other sequences must not see it
        x[0, 0] = NAN
    return {
        "x": x,
        "weight": draw.normal(channels, s["width"], dtype=parameter),
        "bias": draw.normal(channels, dtype=parameter) if s["bias"] else None,
        "initial_state": state, "output_final_state": s["final"], "cu_seqlens": starts,
        "activation": s["activation"],
    }  # fmt: skip


def make_causal_conv1d(s, draw):
    arguments = conv_arguments(s, draw, s["channels"])
    if s["residual"]:
        arguments["residual"] = draw.normal(*arguments["x"].shape, dtype=s["dtype"])
    return arguments


def make_causal_conv1d_qkv(s, draw):
    channels = 2 * s["heads"] * s["keys"] + s["group"] * s["heads"] * s["values"]
    return conv_arguments(s, draw, channels) | {
        "num_k_heads": s["heads"], "num_v_heads": s["group"] * s["heads"],
        "head_k_dim": s["keys"], "head_v_dim": s["values"], "eps": s["eps"],
        "use_qk_l2norm": s["norm"],
    }  # fmt: skip


def make_causal_conv1d_update(s, draw):
    dtype, channels, width = s["dtype"], s["channels"], s["width"]
    parameter = dtype if s["parameter"] == "same" else "float32"
    starts, batch, tokens = None, s["batch"], s["tokens"]
    verify = s["accepted"]
    if s["lengths"] is not None:
        batch, tokens = len(s["lengths"]), max(s["lengths"])
        starts = draw.starts(s["lengths"], s["index"])
        x = draw.normal(int(starts[-1]) + s["spare"], channels, dtype=dtype)
        if s["hide"]:
            x[int(starts[-1]) :] = NAN
    else:
        shape = (batch, tokens) if s["three"] else (batch,)
        tokens = tokens if s["three"] else 1
        x = draw.normal(*shape, channels, dtype=dtype)
    columns = width - 1 + (max(tokens - 1, 0) if verify else 0) + s["spare"]
    indices, slots = None, batch
    if s["indices"]:
        slots = batch + s["spare"]
        indices = tensor(draw.distinct(batch, slots), s["index"])
        if s["pad"] and batch:
            indices[int(draw.integers(batch))] = s["pad"]
    state = draw.normal(slots, channels, columns, dtype=dtype)
    if s["hide"]:
        used = range(slots) if indices is None else indices.tolist()
        for slot in set(range(slots)) - set(used):
            state[slot] = NAN
        if not verify:
            state[..., width - 1 :] = NAN
    arguments = {
        "x": x, "conv_state": state, "weight": draw.normal(channels, width, dtype=parameter),
        "bias": draw.normal(channels, dtype=parameter) if s["bias"] else None,
        "activation": s["activation"], "conv_state_indices": indices, "query_start_loc": starts,
        "num_accepted_tokens": None, "disable_state_update": s["disable"],
    }  # fmt: skip
    if s["pad"]:
        arguments["pad_slot_id"] = s["pad"]
    if verify:
        most = columns - width + 2
        arguments["num_accepted_tokens"] = 1 + draw.integers(most, batch, dtype=s["index"])
    if s["window"] and starts is None:
        rows = batch + s["spare"]
        arguments["intermediate_conv_window"] = draw.normal(
            rows, tokens + s["spare"], channels, width - 1, dtype=dtype
        )
        if s["rows"]:
            chosen = tensor(draw.distinct(batch, rows), s["index"])
            if batch:
                chosen[int(draw.integers(batch))] = -1
            arguments["intermediate_state_indices"] = chosen
    return arguments


# Rotary embedding

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
    """q and k, in memory of their own, side by side in one memory, or over each other."""
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
    """cos and sin `[..., W]`; an inverse needs equal angles for both of a pair."""
    width = rotary_width(s)
    if s["half"]:
        return [draw.normal(*shape, width // 2, dtype=s["table"]) for _ in range(2)]
    if not s["inverse"]:
        return [draw.normal(*shape, width, dtype=s["table"]) for _ in range(2)]
    halves = [draw.normal(*shape, width // 2, dtype=s["table"]) for _ in range(2)]
    return [formulas.full_width(half, width, s["pair_layout"]) for half in halves]


def rope_settings(s):
    return {
        "layout": s["layout"], "pair_layout": s["pair_layout"], "inverse": s["inverse"],
        "inplace": s["inplace"],
    }  # fmt: skip


def make_rope(s, draw):
    packing = s["layout"] == "TND" and s["lengths"] is not None
    tokens = sum(s["lengths"]) if packing else s["tokens"]
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
        freqs = formulas.full_width(
            freqs[..., : rotary_width(s) // 2], rotary_width(s), s["pair_layout"]
        )
    return arguments | {"freqs": freqs * 3, "mscale": s["mscale"]} | more | rope_settings(s)


def sections(s, frequencies):
    """T, H and W of the frequencies; interleaved, H and W may have a third at most."""
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


# The gated delta rule

RULE = {
    "batch": (1, 2), "tokens": (3, 1, 2, 5, 0), "lengths": LENGTHS, "index": INDEX,
    "heads": (1, 2), "group": (1, 2, 3), "keys": (4, 1, 3, 8, 16), "values": (4, 1, 3, 8, 16),
    "state": NO, "final": NO, "norm": NO, "gate": NO, "bias": NO, "sigmoid": NO, "neg": NO,
    "v_first": NO, "scale": (None, 1.0, 0.0, -0.5), "dtype": DTYPES, "gates": ("same", "float32"),
    "broken": NO,
}  # fmt: skip


def rule_arguments(s, draw):
    batch, tokens, starts = packed(s, draw)
    heads, value_heads, dtype = s["heads"], s["heads"] * s["group"], s["dtype"]
    wide = "float64" if dtype == "float64" else "float32"
    gates = dtype if s["gates"] == "same" else wide
    count = batch if starts is None else len(starts) - 1
    shape = (batch, tokens, value_heads)
    q, k = (draw.normal(batch, tokens, heads, s["keys"], dtype="float64") for _ in range(2))
    if not s["norm"]:  # what models give to it: keys of length 1, or the state explodes
        q, k = formulas.unit(q, 1e-6), formulas.unit(k, 1e-6)
    matrix = (s["values"], s["keys"]) if s["v_first"] else (s["keys"], s["values"])
    arguments = {
        "q": q.to(getattr(torch, dtype)), "k": k.to(getattr(torch, dtype)),
        "v": draw.normal(batch, tokens, value_heads, s["values"], dtype=dtype),
        "g": draw.normal(*shape, dtype=gates) if s["gate"] else -draw.uniform(
            0, 1, *shape, dtype=gates
        ),
        "beta": draw.normal(*shape, dtype=gates) if s["sigmoid"] else draw.uniform(
            0, 1, *shape, dtype=gates
        ),
        "scale": s["scale"], "output_final_state": s["final"], "cu_seqlens": starts,
        "use_qk_l2norm_in_kernel": s["norm"], "use_gate_in_kernel": s["gate"],
        "use_beta_sigmoid_in_kernel": s["sigmoid"], "state_v_first": s["v_first"],
        "allow_neg_eigval": s["neg"] and s["sigmoid"],
        "initial_state": draw.normal(count, value_heads, *matrix, dtype=wide) if s["state"] else (
            None
        ),
        "A_log": None, "dt_bias": None,
    }  # fmt: skip
    if s["broken"] and arguments["v"].numel():  # other sequences must not see it
        arguments["v"][0, 0] = NAN
    if s["gate"]:
        arguments["A_log"] = draw.normal(value_heads, dtype=wide) - 2
        if s["bias"]:
            arguments["dt_bias"] = draw.normal(value_heads, dtype=wide)
    return arguments


def make_chunk(s, draw):
    if s["long"] and s["lengths"] is None:
        s = s | {"tokens": 60 + s["tokens"]}
    return rule_arguments(s, draw) | {"chunk_size": s["chunk"]}


def make_recurrent(s, draw):
    arguments = rule_arguments(s, draw)
    shape = arguments["v"].shape
    if s["beta"] == "by value":
        arguments["beta"] = draw.uniform(0, 1, *shape, dtype=s["dtype"])
    if s["beta"] == "none" and not s["sigmoid"]:
        arguments["beta"] = None
    if "g" not in s["decays"] and not s["gate"]:
        arguments["g"] = None
    if "k" in s["decays"]:
        arguments["gk"] = -draw.uniform(0, 1, *shape[:3], s["keys"], dtype=s["dtype"])
    if "v" in s["decays"]:
        arguments["gv"] = -draw.uniform(0, 1, *shape, dtype=s["dtype"])
    return arguments


def make_rule_update(s, draw):
    dtype, index = s["dtype"], s["index"]
    wide = "float64" if dtype == "float64" else "float32"
    pool = wide if dtype == "float64" or not s["small_pool"] else "bfloat16"
    heads, value_heads, keys, values = s["heads"], s["heads"] * s["group"], s["keys"], s["values"]
    starts, count, length = None, s["batch"], s["tokens"]
    tokens = count * length
    if s["lengths"] is not None:
        count, length = len(s["lengths"]), max(s["lengths"])
        starts = draw.starts(s["lengths"], index)
        tokens = sum(s["lengths"]) + s["spare"]
    steps = max(length, 1) + s["spare"]
    matrix = (values, keys) if s["v_first"] else (keys, values)
    by_token = s["verify"] == "vllm"
    slots = max(count * (steps if by_token else 1), 1) + s["spare"]
    chosen = draw.distinct(count * steps if by_token else count, slots)
    indices = tensor(chosen, index)
    if s["skip"] and count:
        indices[int(draw.integers(len(indices)))] = -1
    if by_token:
        indices = indices.view(count, steps)
    q, k = (draw.normal(tokens, heads, keys, dtype=dtype) for _ in range(2))
    v = draw.normal(tokens, value_heads, values, dtype=dtype)
    state = draw.normal(slots, value_heads, *matrix, dtype=pool)
    used = set(indices.flatten().tolist())
    if s["hide"]:
        for slot in set(range(slots)) - used:
            state[slot] = NAN
    split = s["split"]
    arguments = {
        "qkv": (q, k, v) if split else torch.cat([x.flatten(1) for x in (q, k, v)], 1),
        "a": draw.normal(tokens, value_heads, dtype=dtype),
        "b": draw.normal(tokens, value_heads, dtype=dtype),
        "A_log": draw.normal(value_heads, dtype=wide) - 2,
        "dt_bias": draw.normal(value_heads, dtype=wide),
        "state": state, "state_indices": indices, "state_v_first": s["v_first"],
        "cu_seqlens": starts, "disable_state_update": s["disable"], "scale": s["scale"],
        "use_qk_l2norm_in_kernel": s["norm"],
    }  # fmt: skip
    if not s["norm"]:
        size = keys**-0.5
        if split:
            arguments["qkv"] = (q * size, k * size, v)
        else:
            arguments["qkv"][:, : 2 * heads * keys] *= size
    if by_token and s["accepted"]:
        arguments["num_accepted_tokens"] = 1 + draw.integers(steps, count, dtype=index)
    if s["verify"] == "sglang":
        rows = count + s["spare"]
        arguments["intermediate_states"] = draw.normal(
            rows, steps, value_heads, *matrix, dtype=pool
        )
        if s["accepted"]:
            arguments["num_accepted_tokens"] = draw.integers(steps + 1, count, dtype=index)
        if s["rows"]:
            places = tensor(draw.distinct(count, rows), index)
            if count and not s["accepted"]:
                places[int(draw.integers(count))] = -1
            arguments["intermediate_state_indices"] = places
    return arguments


def pool_forms(name, s):
    """States lie apart, but each in one piece."""
    return ("dense", "inside", "apart") if name in ("state", "intermediate_states") else None


# Attention

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
    if p:  # a value for each key shows the weights themselves
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
    """`[B, N, S, D]` in a layout, contiguous; packed tokens are the first batch entry's."""
    if packed_q:
        return x[0].transpose(0, 1).contiguous() if len(x) else x
    return formulas.from_heads(x, layout).contiguous()


def identity(v, layout, heads, dim, arguments):
    """Values that show the weights: key j's is 1 at j, counted within its sequence."""
    keys = v.shape[0] if layout == "TND" else dim
    where = torch.arange(keys, device="cpu")
    if layout == "TND":
        starts = arguments.get("cu_seqlens_k", arguments["cu_seqlens_q"]).long()
        where = where - starts[torch.searchsorted(starts, where, right=True) - 1]
    rows = torch.nn.functional.one_hot(where, dim).to(v.dtype)
    wide = formulas.in_heads(v, layout, heads)
    return formulas.from_heads(rows.expand(*wide.shape[:2], -1, -1), layout).contiguous()


def hide_blocks(k, v, table, lengths, size, layout):
    """NaN in every row of the cache that no sequence has, and nonsense where no block is needed."""
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


def dropped_weights(arguments, outputs):
    """Which weights attention's dropout kept, for each sequence `[N, Sq, Sk]`."""
    if not arguments["dropout_p"]:
        return None
    layout, starts = arguments["layout"], arguments.get("cu_seqlens_q")
    wide = formulas.in_heads(outputs[0].double(), layout, arguments.get("num_heads"))
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


FOLDED = st.sampled_from([2, 1, 0, 3, 5])

TARGETS = {
    "l2norm": Target(
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 16, 40, 128, 0), dtype=DTYPES, eps=(1e-6, 1e-3),
            output_dtype=(None, *DTYPES),
        ),
        make_l2norm, ("x",),
    ),
    "rms_norm_gated": Target(
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 16, 40, 128), groups=(None, 1, 2, 3), dtype=DTYPES,
            weight=DTYPES, z=DTYPES, before=YES, activation=("silu", "sigmoid"), eps=(1e-6, 1e-3),
        ),
        make_rms_norm_gated, ("x", "weight", "z"),
    ),
    "gdn_gate": Target(
        dict(
            shape=SHAPE, heads=(4, 1, 3, 32, 0), dtype=DTYPES, parameter=DTYPES, bias=NO,
            b=(None, *DTYPES), neg=NO, size=(1, 30),
        ),
        make_gdn_gate, ("a", "A_log", "dt_bias", "b"),
    ),
    "bias_dropout_add": Target(
        dict(
            shape=SHAPE, dim=(4, 1, 3, 8, 40, 129, 0), dtype=DTYPES, residual=DTYPES,
            result=(None, *DTYPES), bias=("no", "row", "full"), p=(0.0, 0.1, 0.5, 0.999, 1e-6),
            training=YES, inplace=NO, together=NO,
        ),
        make_bias_dropout_add, ("x", "bias", "residual"),
        writes=lambda s: ("x",) if s["inplace"] else (),
        forms=lambda name, s: ("dense", "inside") if name == "x" and s["inplace"] else None,
        drops=dropped_elements,
    ),
    "causal_conv1d": Target(
        dict(channels=(4, 1, 3, 8, 40, 0), residual=NO, activation=(None, "silu", "swish"), **CONV),
        make_causal_conv1d, ("x", "weight", "bias", "residual", "initial_state"),
        indices=("cu_seqlens",),
    ),
    "causal_conv1d_qkv": Target(
        dict(
            heads=(1, 2), group=(1, 2), keys=(4, 1, 3, 8, 16), values=(4, 1, 3, 8),
            eps=(1e-6, 1e-3), norm=YES, activation=("silu", None), **CONV,
        ),
        make_causal_conv1d_qkv, ("x", "weight", "bias", "initial_state"), indices=("cu_seqlens",),
    ),
    "causal_conv1d_update": Target(
        dict(
            batch=(2, 1, 3, 0), tokens=(2, 1, 3), three=NO, spare=(0, 1, 3),
            lengths=LENGTHS, index=INDEX,
            width=(4, 2, 3), channels=(4, 1, 3, 8, 40), bias=NO, activation=(None, "silu"),
            indices=NO, pad=(None, -1, 99), accepted=NO, window=NO, rows=NO, disable=NO,
            dtype=DTYPES, parameter=("same", "float32"), hide=NO,
        ),
        make_causal_conv1d_update,
        writes=lambda s: ("conv_state", "intermediate_conv_window"),
        indices=(
            "conv_state_indices", "num_accepted_tokens", "query_start_loc",
            "intermediate_state_indices",
        ),
    ),
    "apply_rotary_pos_emb": Target(
        dict(
            lengths=LENGTHS, index=INDEX, positions=("none", "row", "full"),
            table_batch=(None, "one", "full"), spare=(0, 3), **HEADS,
        ),
        make_rope, ("q", "k"), writes=in_place, indices=("cu_seqlens", "position_ids"),
        roundings=8,
    ),
    "apply_rotary_pos_emb_freqs": Target(
        dict(
            lengths=LENGTHS, index=INDEX, cp=(1, 2), last_rank=NO, per_token=NO, padding=(0, 2),
            freqs_batch=NO, mscale=(1.0, 0.5), **{**HEADS, "half": (False,)},
        ),
        make_freqs, ("q", "k"), writes=in_place, indices=("cu_seqlens",), roundings=16,
    ),
    "apply_multimodal_rotary_pos_emb": Target(
        dict(
            section_layout=("chunked", "interleaved"), table_batch=("one", "full"), **HEADS,
        ),
        make_mrope, ("q", "k"), writes=in_place, roundings=8,
    ),
    "apply_multimodal_rotary_pos_emb_cached": Target(
        dict(
            section_layout=("chunked", "interleaved"), index=INDEX, spare=(0, 3), text=NO, flat=NO,
            **{**HEADS, "half": (True,), "layout": ("TND",)},
        ),
        make_mrope_cached, ("q", "k"), writes=in_place, indices=("positions",), roundings=8,
    ),
    "chunk_gated_delta_rule": Target(
        dict(chunk=(64, 16, 32), long=NO, **RULE), make_chunk,
        ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"),
        indices=("cu_seqlens",), roundings=256, loose=True,
    ),
    "fused_recurrent_gated_delta_rule": Target(
        dict(
            beta=("by head", "by value", "none"), decays=("g", "", "gk", "kv", "gkv"), **RULE
        ),
        make_recurrent,
        ("q", "k", "v", "g", "gk", "gv", "beta", "initial_state", "A_log", "dt_bias"),
        indices=("cu_seqlens",), roundings=256,
    ),
    "gated_delta_rule_update": Target(
        dict(
            batch=(2, 1, 3), tokens=(1, 2, 3, 0), spare=(0, 1, 2),
            lengths=LENGTHS, index=INDEX,
            heads=(1, 2), group=(1, 2), keys=(4, 1, 3, 16), values=(4, 1, 3, 16), v_first=NO,
            verify=("no", "sglang", "vllm"), accepted=NO, rows=NO, skip=NO, split=NO, disable=NO,
            norm=YES, small_pool=NO, scale=(None, 1.0), dtype=DTYPES, hide=NO,
        ),
        make_rule_update,
        writes=lambda s: ("state", "intermediate_states"),
        indices=(
            "state_indices", "cu_seqlens", "num_accepted_tokens", "intermediate_state_indices",
        ),
        forms=pool_forms, roundings=256,
    ),
    "attention": Target(
        ATTENTION, make_attention, ("q", "k", "v", "bias", "sinks"),
        indices=("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table"),
        roundings=32, loose=True, drops=dropped_weights,
    ),
}  # fmt: skip
