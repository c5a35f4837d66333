"""Wrong calls: each raises the documented error, naming the argument, and changes nothing."""

import re

import pytest
import torch

import npu_ops

# A right call of every public function: arguments by name, made afresh.


def bias_dropout_add():
    return {
        "x": torch.randn(6, 8), "bias": torch.randn(8), "residual": torch.randn(6, 8), "p": 0.1,
        "training": True,
    }  # fmt: skip


def bias_dropout_add_inplace():
    return bias_dropout_add() | {"inplace": True}


def rope():
    return {
        "q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 5, 3, 8), "cos": torch.randn(2, 5, 8),
        "sin": torch.randn(2, 5, 8), "layout": "BSND",
    }  # fmt: skip


def rope_gather():
    return rope() | {
        "cos": torch.randn(20, 8), "sin": torch.randn(20, 8),
        "position_ids": torch.randint(20, (2, 5)),
    }  # fmt: skip


def rope_packed():
    return {
        "q": torch.randn(10, 4, 8), "k": torch.randn(10, 3, 8), "cos": torch.randn(7, 8),
        "sin": torch.randn(7, 8), "cu_seqlens": torch.tensor([0, 3, 10]),
    }  # fmt: skip


def rope_inplace():
    return rope() | {"inplace": True}


def freqs():
    return {
        "q": torch.randn(5, 2, 4, 8), "k": torch.randn(5, 2, 3, 8),
        "freqs": torch.randn(5, 2, 1, 8),
    }  # fmt: skip


def freqs_packed():
    return {
        "q": torch.randn(8, 4, 8), "k": torch.randn(8, 3, 8), "freqs": torch.randn(16, 1, 1, 8),
        "layout": "TND", "cu_seqlens": torch.tensor([0, 4, 16]), "cp_size": 2, "cp_rank": 1,
    }  # fmt: skip


def freqs_inplace():
    return freqs() | {"inplace": True}


def mrope():
    return rope() | {
        "cos": torch.randn(3, 2, 5, 8), "sin": torch.randn(3, 2, 5, 8), "mrope_section": [2, 1, 1],
        "section_layout": "interleaved",
    }  # fmt: skip


def mrope_packed():
    return mrope() | {
        "q": torch.randn(5, 4, 8), "k": torch.randn(5, 3, 8), "cos": torch.randn(3, 5, 8),
        "sin": torch.randn(3, 5, 8), "layout": "TND",
    }  # fmt: skip


def mrope_inplace():
    return mrope() | {"inplace": True}


def cached():
    return {
        "positions": torch.randint(20, (3, 5)), "q": torch.randn(5, 4, 8),
        "k": torch.randn(5, 3, 8), "cos_sin_cache": torch.randn(20, 8),
        "mrope_section": [2, 1, 1], "section_layout": "chunked",
    }  # fmt: skip


def cached_flat():
    return cached() | {"q": torch.randn(5, 32), "k": torch.randn(5, 24), "head_dim": 8}


def cached_inplace():
    return cached() | {"inplace": True}


def explain():
    return {"op": "bias_dropout_add"} | bias_dropout_add()


FUNCTIONS = {
    bias_dropout_add: npu_ops.bias_dropout_add,
    bias_dropout_add_inplace: npu_ops.bias_dropout_add,
    rope: npu_ops.apply_rotary_pos_emb,
    rope_gather: npu_ops.apply_rotary_pos_emb,
    rope_packed: npu_ops.apply_rotary_pos_emb,
    rope_inplace: npu_ops.apply_rotary_pos_emb,
    freqs: npu_ops.apply_rotary_pos_emb_freqs,
    freqs_packed: npu_ops.apply_rotary_pos_emb_freqs,
    freqs_inplace: npu_ops.apply_rotary_pos_emb_freqs,
    mrope: npu_ops.apply_multimodal_rotary_pos_emb,
    mrope_packed: npu_ops.apply_multimodal_rotary_pos_emb,
    mrope_inplace: npu_ops.apply_multimodal_rotary_pos_emb,
    cached: npu_ops.apply_multimodal_rotary_pos_emb_cached,
    cached_flat: npu_ops.apply_multimodal_rotary_pos_emb_cached,
    cached_inplace: npu_ops.apply_multimodal_rotary_pos_emb_cached,
    explain: npu_ops.explain,
}

# The mistakes: (the right call, what is wrong, the arguments it changes, the error, the argument
# that the message begins with).

MISTAKES = []


def mistakes(call, error, *rows):
    """Add mistakes of one call: what is wrong, {argument: value, or function of the right one},
    and the argument named, if it is not the first one changed."""
    for what, changes, *named in rows:
        MISTAKES.append((call, what, changes, error, named[0] if named else next(iter(changes))))


def tables(*shape):
    return {"cos": torch.randn(shape), "sin": torch.randn(shape)}


def not_floating(call, *names):
    """Not a tensor, or not of a floating dtype."""
    for name in names:
        mistakes(
            call, TypeError,
            (f"{name} is a list", {name: lambda t: t.tolist()}),
            (f"{name} is a NumPy array", {name: lambda t: t.numpy()}),
            (f"{name} is int64", {name: lambda t: t.long()}),
            (f"{name} is bool", {name: lambda t: t > 0}),
            (f"{name} is complex", {name: lambda t: t.cfloat()}),
            (f"{name} is float8", {name: lambda t: t.to(torch.float8_e4m3fn)}),
        )  # fmt: skip


def elsewhere(call, *names):
    for name in names:
        mistakes(call, ValueError, (f"{name} is on another device", {name: lambda t: t.to("meta")}))


def not_an_index(call, name):
    mistakes(
        call, TypeError,
        (f"{name} is a list", {name: lambda t: t.tolist()}),
        (f"{name} is float", {name: lambda t: t.float()}),
        (f"{name} is bool", {name: lambda t: t > 0}),
        (f"{name} is int16", {name: lambda t: t.short()}),
    )  # fmt: skip
    elsewhere(call, name)


def wants_gradient(call, *names, named=None):
    for name in names:
        what = f"{name} requires a gradient"
        mistakes(call, ValueError, (what, {name: lambda t: t.requires_grad_()}, named or name))


not_floating(bias_dropout_add, "x", "bias", "residual")
elsewhere(bias_dropout_add, "bias", "residual")
wants_gradient(bias_dropout_add_inplace, "x", "bias", "residual", named="inplace")
mistakes(
    bias_dropout_add, TypeError,
    ("no x", {"x": None}),
    ("no residual", {"residual": None}),
    ("dtype is int64", {"dtype": torch.int64}),
    ("dtype is bool", {"dtype": torch.bool}),
    ("dtype is complex", {"dtype": torch.complex64}),
    ("dtype is a string", {"dtype": "float32"}),
    ("dtype is float8", {"dtype": torch.float8_e5m2}),
    ("generator is a seed", {"generator": 42}),
)  # fmt: skip
mistakes(
    bias_dropout_add, ValueError,
    ("x is a scalar", {"x": torch.ones(()), "residual": torch.ones(()), "bias": None}),
    ("residual has fewer rows", {"residual": torch.randn(5, 8)}),
    ("residual has more rows", {"residual": torch.randn(7, 8)}),
    ("residual is narrower", {"residual": torch.randn(6, 7)}),
    ("residual is transposed", {"residual": torch.randn(8, 6)}),
    ("residual would have to broadcast", {"residual": torch.randn(8)}),
    ("residual has one row", {"residual": torch.randn(1, 8)}),
    ("residual has a dimension more", {"residual": torch.randn(1, 6, 8)}),
    ("residual is flat", {"residual": torch.randn(48)}),
    ("residual is empty", {"residual": torch.randn(0, 8)}),
    ("bias is too long", {"bias": torch.randn(9)}),
    ("bias is too short", {"bias": torch.randn(7)}),
    ("bias is one number", {"bias": torch.randn(1)}),
    ("bias is a scalar", {"bias": torch.randn(())}),
    ("bias has a row dimension", {"bias": torch.randn(1, 8)}),
    ("bias is per row", {"bias": torch.randn(6, 1)}),
    ("bias has the length of the rows", {"bias": torch.randn(6)}),
    ("bias is transposed", {"bias": torch.randn(8, 6)}),
    ("bias has a dimension more than x", {"bias": torch.randn(1, 6, 8)}),
    ("p is negative", {"p": -0.1}),
    ("p is 1", {"p": 1.0}),
    ("p is the integer 1", {"p": 1}),
    ("p is above 1", {"p": 1.5}),
    ("p is a percentage", {"p": 10}),
    ("p is NaN", {"p": float("nan")}),
    ("p is infinite", {"p": float("inf")}),
    ("p is minus infinity", {"p": float("-inf")}),
    ("p is a string", {"p": "0.1"}),
    ("p is missing", {"p": None}),
    ("p is a tensor", {"p": torch.tensor(0.1)}),
    ("p is complex", {"p": 0.1 + 0j}),
    ("p is wrong, though not training", {"p": 2.0, "training": False}),
)  # fmt: skip
mistakes(
    bias_dropout_add_inplace, ValueError,
    ("residual has another dtype", {"residual": lambda t: t.bfloat16()}, "inplace"),
    ("dtype is not x's", {"dtype": torch.float16}, "inplace"),
    ("x is transposed", {"x": lambda t: t.reshape(8, 6).T}, "inplace"),
    ("x is every second column", {"x": lambda t: t.repeat(1, 2)[:, ::2]}, "inplace"),
    ("x is expanded", {"x": lambda t: t[:1].expand(6, 8)}, "inplace"),
    ("x needs its gradient through a view", {"x": lambda t: t.requires_grad_()[:]}, "inplace"),
)  # fmt: skip


not_floating(rope, "q", "k", "cos", "sin")
elsewhere(rope, "k", "cos", "sin")
wants_gradient(rope, "cos", "sin")
wants_gradient(rope_inplace, "q", "k", named="inplace")
not_an_index(rope_gather, "position_ids")
not_an_index(rope_packed, "cu_seqlens")
mistakes(
    rope, TypeError,
    ("no q", {"q": None}),
    ("no cos", {"cos": None}),
    ("no sin", {"sin": None}),
    ("k has another dtype", {"k": lambda t: t.bfloat16()}),
    ("sin has another dtype", {"sin": lambda t: t.half()}),
)  # fmt: skip
mistakes(
    rope, ValueError,
    ("q has one dimension", {"q": torch.randn(8)}),
    ("q has two dimensions", {"q": torch.randn(5, 8)}),
    ("q has no heads dimension", {"q": torch.randn(2, 5, 8)}),
    ("q has five dimensions", {"q": torch.randn(1, 2, 5, 4, 8)}),
    ("q has two dimensions and no layout", {"q": torch.randn(5, 8), "layout": None}),
    ("layout is unknown", {"layout": "BSHD"}),
    ("layout is lower case", {"layout": "bsnd"}),
    ("layout is empty", {"layout": ""}),
    ("layout is a number", {"layout": 2}),
    ("layout is packed, q is not", {"layout": "TND"}, "q"),
    ("unsqueeze_dim is 0", {"unsqueeze_dim": 0, "layout": None}),
    ("unsqueeze_dim is 3", {"unsqueeze_dim": 3, "layout": None}),
    ("unsqueeze_dim is negative", {"unsqueeze_dim": -1, "layout": None}),
    ("pair_layout is NeoX by name", {"pair_layout": "neox"}),
    ("pair_layout is capitalised", {"pair_layout": "Half"}),
    ("pair_layout is xLLM's word", {"pair_layout": "interleave"}),
    ("pair_layout is a section layout", {"pair_layout": "chunked"}),
    ("pair_layout is a flag", {"pair_layout": True}),
    ("pair_layout is missing", {"pair_layout": None}),
    ("k has another batch", {"k": torch.randn(3, 5, 3, 8)}),
    ("k has a batch of one", {"k": torch.randn(1, 5, 3, 8)}),
    ("k is longer", {"k": torch.randn(2, 6, 3, 8)}),
    ("k is shorter", {"k": torch.randn(2, 4, 3, 8)}),
    ("k has another head_dim", {"k": torch.randn(2, 5, 3, 6)}),
    ("k is packed", {"k": torch.randn(10, 3, 8)}),
    ("k has another layout", {"k": torch.randn(2, 3, 5, 8)}),
    ("k has another layout, SBND", {"k": torch.randn(2, 3, 5, 8), "layout": "SBND"}),
    ("k has another layout, BNSD", {"k": torch.randn(2, 3, 5, 8), "layout": "BNSD"}, "k"),
    ("cos has one dimension", {"cos": torch.randn(8)}, "sin"),
    ("cos and sin have one dimension", tables(8)),
    ("cos is unsqueezed already", tables(2, 5, 1, 8)),
    ("cos is mrope's", tables(3, 2, 5, 8)),
    ("cos and sin are too long", tables(2, 9, 8)),
    ("cos and sin are too short", tables(2, 4, 8)),
    ("a whole table, no position_ids", tables(20, 8)),
    ("cos and sin have another batch", tables(3, 5, 8)),
    ("sin is longer than cos", {"sin": torch.randn(2, 6, 8)}),
    ("sin is narrower than cos", {"sin": torch.randn(2, 5, 4)}),
    ("sin lacks the batch", {"sin": torch.randn(5, 8)}),
    ("cos and sin are wider than a head", tables(5, 10), "rotary_dim"),
    ("cos and sin are odd", tables(5, 7), "rotary_dim"),
    ("cos and sin are empty", tables(5, 0), "rotary_dim"),
    ("half-width tables, or half of a head", tables(5, 4), "rotary_dim"),
    ("rotary_dim is odd", {"rotary_dim": 7}),
    ("rotary_dim is 0", {"rotary_dim": 0}),
    ("rotary_dim is negative", {"rotary_dim": -8}),
    ("rotary_dim is more than a head", {"rotary_dim": 16}),
    ("rotary_dim is a fraction", {"rotary_dim": 0.5}),
    ("rotary_dim is a float", {"rotary_dim": 8.0}),
    ("rotary_dim is a string", {"rotary_dim": "8"}),
    ("rotary_dim is smaller than the tables", {"rotary_dim": 6}, "cos"),
    ("rotary_dim is less than half the tables", {"rotary_dim": 2}, "cos"),
    ("cu_seqlens of a batch", {"cu_seqlens": torch.tensor([0, 5])}),
)  # fmt: skip
mistakes(
    rope_gather, ValueError,
    ("position_ids are too short", {"position_ids": torch.zeros(2, 4, dtype=torch.long)}),
    ("position_ids are too long", {"position_ids": torch.zeros(2, 6, dtype=torch.long)}),
    ("position_ids have another batch", {"position_ids": torch.zeros(3, 5, dtype=torch.long)}),
    ("position_ids are transposed", {"position_ids": torch.zeros(5, 2, dtype=torch.long)}),
    ("position_ids are flat", {"position_ids": torch.zeros(10, dtype=torch.long)}),
    ("position_ids are one", {"position_ids": torch.tensor(0)}),
    ("position_ids are mrope's", {"position_ids": torch.zeros(3, 2, 5, dtype=torch.long)}),
    ("a position is past the table", {"position_ids": torch.tensor([[0, 1, 2, 3, 20]])}),
    ("a position is negative", {"position_ids": torch.tensor([[0, 1, -1, 3, 4]])}),
    ("a position is huge", {"position_ids": torch.tensor([[0, 1, 2**40, 3, 4]])}),
    ("a position of a 32-bit tensor is past the table",
     {"position_ids": torch.full((2, 5), 20, dtype=torch.int32)}),
)  # fmt: skip
mistakes(
    rope_packed, ValueError,
    ("cu_seqlens end late", {"cu_seqlens": torch.tensor([0, 3, 11])}),
    ("cu_seqlens lack the leading 0", {"cu_seqlens": torch.tensor([3, 10])}),
    ("cu_seqlens are lengths", {"cu_seqlens": torch.tensor([3, 7])}),
    ("cu_seqlens decrease", {"cu_seqlens": torch.tensor([0, 5, 3, 10])}),
    ("cu_seqlens are one number", {"cu_seqlens": torch.tensor([0])}),
    ("cu_seqlens are empty", {"cu_seqlens": torch.tensor([], dtype=torch.long)}),
    ("cu_seqlens are a scalar", {"cu_seqlens": torch.tensor(10)}),
    ("cu_seqlens have two dimensions", {"cu_seqlens": torch.tensor([[0, 3, 10]])}),
    ("a sequence is longer than the tables", {"cu_seqlens": torch.tensor([0, 2, 10])}),
    ("position_ids too", {"cu_seqlens": lambda t: t, "position_ids": torch.arange(10)}),
    ("tables have a batch", tables(1, 7, 8)),
    ("k has other tokens", {"k": torch.randn(9, 3, 8)}),
    ("k has another head_dim", {"k": torch.randn(10, 3, 16)}),
    ("q is not packed",
     {"cu_seqlens": lambda t: t, "q": torch.randn(1, 10, 4, 8), "k": None, "layout": "BSND"}),
)  # fmt: skip
mistakes(
    rope_inplace, ValueError,
    ("q is expanded", {"q": lambda t: t[:, :, :1].expand(2, 5, 4, 8)}),
    ("k is expanded", {"k": lambda t: t[:1].expand(2, 5, 3, 8)}),
    ("k is a view of what needs a gradient", {"k": lambda t: t.requires_grad_()[:]}, "inplace"),
)  # fmt: skip


not_floating(freqs, "q", "k", "freqs")
elsewhere(freqs, "k", "freqs")
wants_gradient(freqs, "freqs")
wants_gradient(freqs_inplace, "q", "k", named="inplace")
not_an_index(freqs_packed, "cu_seqlens")
mistakes(
    freqs, TypeError,
    ("no q", {"q": None}),
    ("no freqs", {"freqs": None}),
    ("k has another dtype", {"k": lambda t: t.half()}),
    ("mscale is a string", {"mscale": "1.0"}),
    ("mscale is missing", {"mscale": None}),
    ("cp_size is a float", {"cp_size": 2.0}),
    ("cp_rank is missing", {"cp_rank": None}),
)  # fmt: skip
mistakes(
    freqs, ValueError,
    ("q is packed, layout is not", {"q": torch.randn(5, 4, 8)}),
    ("layout is Megatron's word", {"layout": "sbhd"}),
    ("layout is wrong for freqs", {"layout": "BSND"}, "freqs"),
    ("pair_layout is wrong", {"pair_layout": "gptj"}),
    ("k has another batch", {"k": torch.randn(5, 1, 3, 8)}),
    ("k is longer", {"k": torch.randn(6, 2, 3, 8)}),
    ("freqs have two dimensions", {"freqs": torch.randn(5, 8)}),
    ("freqs have three dimensions", {"freqs": torch.randn(5, 1, 8)}),
    ("freqs have five dimensions", {"freqs": torch.randn(5, 1, 1, 1, 8)}),
    ("freqs have heads", {"freqs": torch.randn(5, 1, 4, 8)}),
    ("freqs have another batch", {"freqs": torch.randn(5, 3, 1, 8)}),
    ("freqs are too long", {"freqs": torch.randn(9, 1, 1, 8)}),
    ("freqs are too short", {"freqs": torch.randn(4, 1, 1, 8)}),
    ("freqs are wider than a head", {"freqs": torch.randn(5, 1, 1, 10)}),
    ("freqs are odd", {"freqs": torch.randn(5, 1, 1, 7)}),
    ("freqs are empty", {"freqs": torch.randn(5, 1, 1, 0)}),
    ("cu_seqlens of a batch", {"cu_seqlens": torch.tensor([0, 5])}),
)  # fmt: skip
mistakes(
    freqs_packed, ValueError,
    ("cu_seqlens are one number", {"cu_seqlens": torch.tensor([0])}),
    ("cu_seqlens are a scalar", {"cu_seqlens": torch.tensor(16)}),
    ("cu_seqlens have two dimensions", {"cu_seqlens": torch.tensor([[0, 16]])}),
    ("cp_rank is the size", {"cp_rank": 2}),
    ("cp_rank is negative", {"cp_rank": -1}),
    ("cp_size without cu_seqlens", {"cp_size": 2, "cu_seqlens": None}),
    ("cp_rank without cu_seqlens", {"cp_rank": 1, "cp_size": 1, "cu_seqlens": None}),
    ("cp_size is 0", {"cp_size": 0}, "cp_rank"),
    ("freqs have a batch", {"freqs": torch.randn(16, 2, 1, 8)}),
    ("freqs are packed as well", {"freqs": torch.randn(16, 1, 8)}),
    ("layout is not packed",
     {"cu_seqlens": lambda t: t, "layout": "SBND", "q": torch.randn(8, 1, 4, 8), "k": None}),
)  # fmt: skip


not_floating(mrope, "q", "k", "cos", "sin")
elsewhere(mrope, "k", "cos", "sin")
wants_gradient(mrope, "cos", "sin")
wants_gradient(mrope_inplace, "q", "k", named="inplace")
mistakes(
    mrope, TypeError,
    ("no q", {"q": None}),
    ("no cos", {"cos": None}),
    ("k has another dtype", {"k": lambda t: t.half()}),
    ("sin has another dtype", {"sin": lambda t: t.bfloat16()}),
    ("no mrope_section", {"mrope_section": None}),
    ("mrope_section is one number", {"mrope_section": 4}),
)  # fmt: skip
SECTIONS = (
    ("mrope_section has two counts", {"mrope_section": [2, 2]}),
    ("mrope_section has four counts", {"mrope_section": [1, 1, 1, 1]}),
    ("mrope_section is empty", {"mrope_section": []}),
    ("mrope_section is too small", {"mrope_section": [1, 1, 1]}),
    ("mrope_section has a negative count", {"mrope_section": [6, -1, -1]}),
    ("mrope_section has a float", {"mrope_section": [2.0, 1, 1]}),
    ("mrope_section is text", {"mrope_section": "211"}),
    ("mrope_section is nested", {"mrope_section": [[2, 1, 1]]}),
    ("section_layout is a pair layout", {"section_layout": "half"}),
    ("section_layout is unknown", {"section_layout": "interleave"}),
    ("section_layout is missing", {"section_layout": None}),
    ("section_layout is a flag", {"section_layout": True}),
    ("pair_layout is a section layout", {"pair_layout": "chunked"}),
)  # fmt: skip
mistakes(mrope, ValueError, *SECTIONS)
mistakes(
    mrope, ValueError,
    ("cos and sin are rope's", tables(2, 5, 8)),
    ("cos and sin have two axes", tables(2, 2, 5, 8)),
    ("cos and sin have four axes", tables(4, 2, 5, 8)),
    ("cos and sin have the axes last", tables(2, 5, 8, 3)),
    ("cos and sin are too long", tables(3, 2, 6, 8)),
    ("cos and sin have another batch", tables(3, 3, 5, 8)),
    ("sin has another shape", {"sin": torch.randn(3, 1, 5, 8)}),
    ("half-width tables, or half of a head", tables(3, 2, 5, 4), "rotary_dim"),
    ("rotary_dim is odd", {"rotary_dim": 5}),
    ("rotary_dim is more than a head", {"rotary_dim": 10}),
    ("layout is unknown", {"layout": "BHSD"}),
    ("unsqueeze_dim is 0", {"unsqueeze_dim": 0, "layout": None}),
    ("k is longer", {"k": torch.randn(2, 6, 3, 8)}),
    ("q has two dimensions", {"q": torch.randn(5, 8), "layout": None}),
)  # fmt: skip
mistakes(
    mrope_packed, ValueError,
    ("cos and sin have a batch", tables(3, 1, 5, 8)),
    ("cos and sin are rope's", tables(5, 8)),
    ("cos and sin are too short", tables(3, 4, 8)),
    ("k has other tokens", {"k": torch.randn(6, 3, 8)}),
)  # fmt: skip
mistakes(
    mrope_inplace, ValueError,
    ("q is expanded", {"q": lambda t: t[:1].expand(2, 5, 4, 8)}),
    ("k is expanded", {"k": lambda t: t[:, :1].expand(2, 5, 3, 8)}),
)  # fmt: skip


not_floating(cached, "q", "k", "cos_sin_cache")
elsewhere(cached, "k", "cos_sin_cache")
wants_gradient(cached, "cos_sin_cache")
wants_gradient(cached_inplace, "q", "k", named="inplace")
not_an_index(cached, "positions")
mistakes(
    cached, TypeError,
    ("no positions", {"positions": None}),
    ("no cache", {"cos_sin_cache": None}),
    ("k has another dtype", {"k": lambda t: t.half()}),
)  # fmt: skip
mistakes(cached, ValueError, *SECTIONS)
mistakes(
    cached, ValueError,
    ("positions have two axes", {"positions": torch.zeros(2, 5, dtype=torch.long)}),
    ("positions have an axis too many", {"positions": torch.zeros(1, 5, dtype=torch.long)}),
    ("positions are transposed", {"positions": torch.zeros(5, 3, dtype=torch.long)}),
    ("positions are too short", {"positions": torch.zeros(3, 4, dtype=torch.long)}),
    ("text positions are too long", {"positions": torch.zeros(6, dtype=torch.long)}),
    ("positions have a batch", {"positions": torch.zeros(3, 1, 5, dtype=torch.long)}),
    ("a position is past the cache", {"positions": torch.tensor([0, 1, 2, 3, 20])}),
    ("a position is negative", {"positions": torch.tensor([0, 1, 2, 3, -1])}),
    ("a position of W is past the cache",
     {"positions": torch.tensor([[0] * 5, [1] * 5, [1, 1, 1, 20, 1]])}),
    ("the cache has one dimension", {"cos_sin_cache": torch.randn(8)}),
    ("the cache has three dimensions", {"cos_sin_cache": torch.randn(1, 20, 8)}),
    ("the cache is odd", {"cos_sin_cache": torch.randn(20, 7)}),
    ("the cache is wider than a head", {"cos_sin_cache": torch.randn(20, 12)}, "rotary_dim"),
    ("rotary_dim is half the cache", {"rotary_dim": 4}),
    ("rotary_dim is more than the cache", {"rotary_dim": 16}),
    ("head_dim is not that of q", {"head_dim": 16}, "q"),
    ("q has four dimensions", {"q": torch.randn(1, 5, 4, 8)}),
    ("q is flat, without head_dim", {"q": torch.randn(5, 32)}),
    ("k is flat, without head_dim", {"k": torch.randn(5, 24)}),
    ("k has other tokens", {"k": torch.randn(6, 3, 8)}),
    ("k has another head_dim", {"k": torch.randn(5, 3, 16)}),
)  # fmt: skip
mistakes(
    cached_flat, ValueError,
    ("head_dim does not divide q", {"head_dim": 12}, "q"),
    ("head_dim does not divide k", {"k": torch.randn(5, 20)}),
    ("head_dim is 0", {"head_dim": 0}, "q"),
    ("q is one row", {"q": torch.randn(32)}),
)  # fmt: skip
mistakes(
    cached_inplace, ValueError,
    ("q is expanded", {"q": lambda t: t[:1].expand(5, 4, 8)}),
    ("k is expanded", {"k": lambda t: t[:1].expand(5, 3, 8)}),
)  # fmt: skip


mistakes(
    explain, ValueError,
    ("no such op", {"op": "layer_norm"}),
    ("the torch operator's name", {"op": "npu_ops::bias_dropout_add"}),
    ("op is a function of another library", {"op": lambda op: torch.nn.functional.dropout}),
    ("op is missing", {"op": None}),
    ("p of the op is wrong", {"p": 2.0}),
    ("bias of the op is wrong", {"bias": torch.randn(9)}),
)  # fmt: skip


def build(call, changes):
    arguments = call()
    for name, value in changes.items():
        arguments[name] = value(arguments[name]) if name in arguments and callable(value) else value
    return arguments


def snapshot(arguments):
    """Every tensor's bits and version."""
    return {
        name: (value._version, value.detach().contiguous().view(torch.uint8).tolist())
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim()
    }


def parametrize(rows):
    return pytest.mark.parametrize(
        "call, what, changes, error, argument",
        rows,
        ids=[f"{call.__name__}: {what}" for call, what, *_ in rows],
    )


@parametrize(MISTAKES)
def test_mistake(call, what, changes, error, argument):
    arguments = build(call, changes)
    before, state = snapshot(arguments), torch.get_rng_state()
    with pytest.raises(error, match=f"^{re.escape(argument)}: "):
        FUNCTIONS[call](**arguments)
    assert snapshot(arguments) == before
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"


@parametrize([row for row in MISTAKES if row[0] is not explain])
def test_explain_makes_the_same_complaint(call, what, changes, error, argument):
    with pytest.raises(error, match=f"^{re.escape(argument)}: "):
        npu_ops.explain(FUNCTIONS[call], **build(call, changes))


@pytest.mark.parametrize("call", FUNCTIONS)
def test_the_right_calls_are_right(call):
    """Or every mistake would be found for the wrong reason."""
    FUNCTIONS[call](**call())


def test_there_are_many_different_mistakes():
    assert len({(call, what) for call, what, *_ in MISTAKES}) == len(MISTAKES) >= 200
