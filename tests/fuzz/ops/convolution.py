"""Fuzzer targets of the causal convolutions."""

from __future__ import annotations

import torch

from fuzz.formula import Out, need, need_ranks, sigmoid, spans, unit
from fuzz.target import (
    DTYPES,
    INDEX,
    LENGTHS,
    NAN,
    NO,
    RANKS,
    TOKENS,
    YES,
    Target,
    packed,
    ranks,
    tensor,
)  # fmt: skip

# Expected results


def silu(y, activation):
    return y if activation is None else y * sigmoid(y)


def convolved(rows, weight, bias, activation):
    """Convolve rows `[W - 1 + T, D]`, of which the last T are tokens; return `[T, D]`."""
    width = weight.shape[1]
    tokens = rows.shape[0] - (width - 1)
    y = sum(rows[j : j + tokens] * weight[:, j] for j in range(width))
    return silu(y if bias is None else y + bias, activation)


def sequences_of(x, cu_seqlens):
    """Return `[T, D]` of each sequence."""
    if cu_seqlens is None:
        return list(x)
    return [x[0, b:e] for b, e in spans(cu_seqlens, x.shape[1], "cu_seqlens")]


def causal_conv1d(
    x, weight, bias=None, residual=None, initial_state=None, output_final_state=False,
    activation=None, cu_seqlens=None, conv_state=None, conv_state_indices=None,
    has_initial_state=None, pad_slot_id=-1, cp_group=None, cp_layout="contiguous",
):  # fmt: skip
    states = {"initial_state": initial_state, "conv_state": conv_state}
    need_ranks(cp_group, cp_layout, cu_seqlens, **states)
    if conv_state is not None:
        pool = conv_state, conv_state_indices, has_initial_state, pad_slot_id
        return of_pool(x, weight, bias, residual, activation, cu_seqlens, *pool)
    width, ys, finals = weight.shape[1], [], []
    for n, tokens in enumerate(sequences_of(x, cu_seqlens)):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].T
        rows = torch.cat([before, tokens])
        ys.append(convolved(rows[1:], weight, bias, activation))
        finals.append(rows[len(rows) - width :].T)
    inside = sum(map(len, ys))
    if residual is not None:
        ys = [torch.cat([x.new_zeros(0, x.shape[2]), *ys]) + residual.flatten(0, 1)[:inside]]
    y = torch.cat([*ys, x.new_zeros(x.shape[0] * x.shape[1] - inside, x.shape[2])]).view(x.shape)
    finals = torch.stack(finals) if finals else x.new_zeros(0, x.shape[2], width)
    return [Out(y), Out(finals if output_final_state else None)]


def of_pool(
    x, weight, bias, residual, activation, cu_seqlens, pool, indices, has_initial_state, pad
):  # fmt: skip
    """Convolve with a pool of states.

    A sequence reads the first W - 1 columns of its slot and overwrites them.
    """
    history = weight.shape[1] - 1
    count = len(sequences_of(x, cu_seqlens))
    slot_of = list(range(count)) if indices is None else indices.tolist()
    real = [n for n, slot in enumerate(slot_of) if indices is None or slot != pad]
    need(all(0 <= slot_of[n] < len(pool) for n in real), "conv_state_indices")
    need(len({slot_of[n] for n in real}) == len(real), "conv_state_indices")
    before, after = x.new_zeros(count, x.shape[2], history + 1), pool.clone()
    for n in real:
        if has_initial_state is None or has_initial_state[n]:
            before[n, :, 1:] = pool[slot_of[n], :, :history]
    y, final = causal_conv1d(x, weight, bias, residual, before, True, activation, cu_seqlens)
    for n in real:
        after[slot_of[n], :, :history] = final.value[n, :, 1:]
    return [y, Out(None), Out(after, "conv_state")]


def causal_conv1d_qkv(
    x, weight, bias=None, num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=1,
    initial_state=None, output_final_state=False, activation="silu", cu_seqlens=None, eps=1e-6,
    use_qk_l2norm=True,
):  # fmt: skip
    y, final = causal_conv1d(
        x, weight, bias, None, initial_state, output_final_state, activation, cu_seqlens
    )
    keys, values = num_k_heads * head_k_dim, num_v_heads * head_v_dim
    q, k, v = y.value.split([keys, keys, values], -1)
    q, k = (part.unflatten(-1, (num_k_heads, head_k_dim)) for part in (q, k))
    if use_qk_l2norm:
        q, k = unit(q, eps), unit(k, eps)
    return [Out(q), Out(k), Out(v.unflatten(-1, (num_v_heads, head_v_dim))), final]


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    num_accepted_tokens=None, query_start_loc=None, pad_slot_id=-1, intermediate_conv_window=None,
    intermediate_state_indices=None, disable_state_update=False,
):  # fmt: skip
    history, (slots, channels, columns) = weight.shape[1] - 1, conv_state.shape
    skipped = torch.zeros(0, dtype=torch.bool)
    if conv_state_indices is not None:
        skipped = conv_state_indices == pad_slot_id
    flat = x.reshape(-1, channels)
    if query_start_loc is not None:
        pieces = spans(query_start_loc, len(flat), "query_start_loc")
    else:
        length = 1 if x.dim() == 2 else x.shape[1]
        pieces = [(n * length, n * length + length) for n in range(x.shape[0])]
    count = len(pieces)
    slot_of = list(range(count)) if conv_state_indices is None else conv_state_indices.tolist()
    real = [slot for slot in slot_of if slot != pad_slot_id or conv_state_indices is None]
    need(all(0 <= slot < slots for slot in real), "conv_state_indices")
    need(disable_state_update or len(set(real)) == len(real), "conv_state_indices")
    row_of = list(range(count))
    if intermediate_state_indices is not None:
        row_of = intermediate_state_indices.tolist()
        rows = len(intermediate_conv_window)
        there = [row for n, row in enumerate(row_of) if not skipped[n : n + 1].any()]
        kept = [row for row in there if row != -1]
        need(all(0 <= row < rows for row in kept), "intermediate_state_indices")
        need(len(set(kept)) == len(kept), "intermediate_state_indices")
    y, state = torch.zeros_like(flat), conv_state.clone()
    window = None if intermediate_conv_window is None else intermediate_conv_window.clone()
    for n, (begin, end) in enumerate(pieces):
        slot = slot_of[n]
        if conv_state_indices is not None and slot == pad_slot_id:
            continue
        first = 0
        if num_accepted_tokens is not None:
            first = int(num_accepted_tokens[n]) - 1
            need(0 <= first <= columns - history, "num_accepted_tokens")
            need(history - 1 + end - begin <= columns, "query_start_loc")
        rows = torch.cat([conv_state[slot, :, first : first + history].T, flat[begin:end]])
        y[begin:end] = convolved(rows, weight, bias, activation)
        if begin == end:
            continue
        if not disable_state_update:
            kept = rows[len(rows) - history :] if num_accepted_tokens is None else rows[1:]
            state[slot, :, : len(kept)] = kept.T
        if window is not None and row_of[n] >= 0:
            for t in range(end - begin):
                window[row_of[n], t] = rows[t + 1 : t + 1 + history].T
    outs = [Out(y.view(x.shape)), Out(state, "conv_state")]
    return outs if window is None else [*outs, Out(window, "intermediate_conv_window")]


# Calls to draw


CONV = {
    "batch": (1, 2, 0), "tokens": TOKENS, "lengths": LENGTHS, "index": INDEX, "width": (4, 2, 3, 8),
    "bias": NO, "state": NO, "final": NO, "dtype": DTYPES, "parameter": ("same", "float32"),
    "hide": NO, "broken": NO, "behind": (0, 1, 5),
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
    if s["broken"] and x.numel():  # the NaN must not reach other sequences
        x[0, 0] = NAN
    if s["hide"] and starts is not None:  # rows of no sequence are not read
        x[0, int(starts[-1]) :] = NAN
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
    arguments |= ranks(s)
    return arguments | pool_arguments(s, draw, arguments) if s["pool"] else arguments


def pool_arguments(s, draw, arguments):
    x, starts = arguments["x"], arguments["cu_seqlens"]
    count = len(x) if starts is None else len(starts) - 1
    slots, indices = count + s["spare"], None
    if s["indices"]:
        indices = tensor(draw.distinct(count, slots), s["index"])
        if s["pad"] is not None and count:
            indices[int(draw.integers(count))] = s["pad"]
    dtype = s["dtype"] if s["pool_dtype"] == "same" else s["pool_dtype"]
    pool = draw.normal(slots, x.shape[2], s["width"] - 1 + s["spare"], dtype=dtype)
    if s["hide"]:
        used = range(count) if indices is None else indices.tolist()
        for slot in set(range(slots)) - set(used):
            pool[slot] = NAN
    found = {"initial_state": None, "output_final_state": False, "conv_state": pool}
    if s["pad"] is not None:
        found["pad_slot_id"] = s["pad"]
    if s["first"]:
        found["has_initial_state"] = draw.integers(2, count).bool()
    return found | {"conv_state_indices": indices}


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
    if s["hide"] and indices is not None:  # invalid values of skipped sequences, not to be read
        for name in ("num_accepted_tokens", "intermediate_state_indices"):
            if arguments.get(name) is not None:
                arguments[name][indices == (s["pad"] or -1)] = 77
    return arguments


TARGETS = {
    "causal_conv1d": Target(
        causal_conv1d,
        dict(
            channels=(4, 1, 3, 8, 40, 0), residual=NO, activation=(None, "silu", "swish"), pool=NO,
            spare=(0, 1, 3), indices=NO, pad=(None, -1, 1, 99), first=NO,
            pool_dtype=("same", "float32", "bfloat16"), ranks=RANKS, **CONV,
        ),
        make_causal_conv1d, ("x", "weight", "bias", "residual", "initial_state"),
        writes=lambda s: ("conv_state",), indices=("cu_seqlens", "conv_state_indices"),
        inference=lambda s: s["pool"], tokens=("x", "residual"),
    ),
    "causal_conv1d_qkv": Target(
        causal_conv1d_qkv,
        dict(
            heads=(1, 2), group=(1, 2), keys=(4, 1, 3, 8, 16), values=(4, 1, 3, 8),
            eps=(1e-6, 1e-3), norm=YES, activation=("silu", None), **CONV,
        ),
        make_causal_conv1d_qkv, ("x", "weight", "bias", "initial_state"), indices=("cu_seqlens",),
        tokens=("x",),
    ),
    "causal_conv1d_update": Target(
        causal_conv1d_update,
        dict(
            batch=(2, 1, 3, 0), tokens=(2, 1, 3), three=NO, spare=(0, 1, 3),
            lengths=LENGTHS, index=INDEX,
            width=(4, 2, 3, 8), channels=(4, 1, 3, 8, 40), bias=NO, activation=(None, "silu"),
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
}  # fmt: skip
