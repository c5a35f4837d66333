"""Fuzzer targets of the gated delta rules."""

from __future__ import annotations

import torch

from fuzz.formula import Out, need, need_ranks, sigmoid, softplus, spans, unit
from fuzz.ops.norms import gdn_gate
from fuzz.target import (
    DTYPES,
    INDEX,
    LENGTHS,
    NAN,
    NO,
    RANKS,
    YES,
    Target,
    packed,
    ranks,
    tensor,
)  # fmt: skip

# Expected results


def delta_rule(state, q, k, v, beta, log_decay):
    """Return the state after one token, and its output.

    state: `[HV, K, V]`. q, k: `[HV, K]`. v: `[HV, V]`. beta: `[HV, 1 or V]`.
    """
    state = state * torch.exp(log_decay)
    recalled = torch.einsum("hkv,hk->hv", state, k)
    state = state + torch.einsum("hk,hv->hkv", k, beta * (v - recalled))
    return state, torch.einsum("hkv,hk->hv", state, q)


def gated_delta_rule(
    q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
    use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
    state_v_first, cu_seqlens, chunk_size=None,
):  # fmt: skip
    """Return o and the final state; with chunk_size, also the state before each chunk."""
    (batch, length, heads, keys), (value_heads, values) = q.shape, v.shape[2:]
    if use_qk_l2norm_in_kernel:
        q, k = unit(q, 1e-6), unit(k, 1e-6)
    if use_gate_in_kernel:
        g = gdn_gate(g, A_log, dt_bias)[0].value
    if use_beta_sigmoid_in_kernel:
        beta = sigmoid(beta) * (2 if allow_neg_eigval else 1)
    q, k = (x.repeat_interleave(value_heads // heads, 2) for x in (q, k))
    q = q * (keys**-0.5 if scale is None else scale)
    log_decay = v.new_zeros(*v.shape[:3], 1, 1)
    for gate, place in ((g, (1, 1)), (gk, (-1, 1)), (gv, (1, -1))):
        if gate is not None:
            log_decay = log_decay + gate.reshape(
                *v.shape[:3], *(gate.shape[-1] if n == -1 else 1 for n in place)
            )
    beta = v.new_ones(*v.shape[:3], 1) if beta is None else beta
    beta = beta if beta.dim() == 4 else beta[..., None]
    pieces = [(n, 0, length) for n in range(batch)]
    if cu_seqlens is not None:
        pieces = [(0, *span) for span in spans(cu_seqlens, length, "cu_seqlens")]
    o, finals, before = {}, [], []
    for n, (b, begin, end) in enumerate(pieces):
        state = v.new_zeros(value_heads, keys, values)
        if initial_state is not None:
            state = initial_state[n].mT if state_v_first else initial_state[n]
        for t in range(begin, end):
            if chunk_size and (t - begin) % chunk_size == 0:
                before.append(state.mT if state_v_first else state)
            state, o[b, t] = delta_rule(state, *(x[b, t] for x in (q, k, v, beta, log_decay)))
        finals.append(state.mT if state_v_first else state)
    nobodys = v.new_zeros(value_heads, values)
    flat = [o.get((b, t), nobodys) for b in range(batch) for t in range(length)]
    out = torch.stack(flat).view(v.shape) if flat else torch.zeros_like(v)
    shape = (0, value_heads, *((values, keys) if state_v_first else (keys, values)))
    final = torch.stack(finals) if finals else v.new_zeros(shape)
    outs = [Out(out), Out(final if output_final_state else None)]
    if not chunk_size:
        return outs
    rows = len(before) if cu_seqlens is None else length // chunk_size + len(pieces)
    spare = v.new_zeros(rows - len(before), *shape[1:])
    return [*outs, Out(torch.cat([torch.stack(before), spare]) if before else spare)]


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None,
):  # fmt: skip
    return gated_delta_rule(
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, cu_seqlens,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    chunk_size=64, return_intermediate_states=False, cp_group=None, cp_layout="contiguous",
):  # fmt: skip
    states = {
        "initial_state": initial_state,
        "return_intermediate_states": return_intermediate_states,
    }
    need_ranks(cp_group, cp_layout, cu_seqlens, **states)
    return gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, cu_seqlens, return_intermediate_states and chunk_size,
    )  # fmt: skip


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
    A_log=None, dt_bias=None, chunk_size=64,
):  # fmt: skip
    if use_gate_in_kernel:
        raw = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        rate = 1.0 if A_log is None else torch.exp(A_log)[:, None]
        if lower_bound is None:
            g = -rate * softplus(raw, 1.0, 20.0)
        else:
            g = lower_bound * sigmoid(rate * raw)
    return gated_delta_rule(
        q, k, v, None, g, None, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, False, None, None, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens,
    )  # fmt: skip


def gated_delta_rule_update(
    qkv, a, b, A_log, dt_bias, state, state_indices, state_v_first, cu_seqlens=None,
    num_accepted_tokens=None, intermediate_states=None, intermediate_state_indices=None,
    disable_state_update=False, scale=None, use_qk_l2norm_in_kernel=True, softplus_beta=1.0,
    softplus_threshold=20.0,
):  # fmt: skip
    slots, value_heads = state.shape[:2]
    keys, values = state.shape[:1:-1] if state_v_first else state.shape[2:]
    if isinstance(qkv, tuple):
        q, k, v = qkv
    else:
        width = (qkv.shape[1] - value_heads * values) // 2
        q, k, v = qkv.split([width, width, value_heads * values], 1)
        q, k = (x.unflatten(1, (-1, keys)) for x in (q, k))
        v = v.unflatten(1, (value_heads, values))
    tokens, count = v.shape[0], state_indices.shape[0]
    if use_qk_l2norm_in_kernel:
        q, k = unit(q, 1e-6), unit(k, 1e-6)
    q, k = (x.repeat_interleave(value_heads // q.shape[1], 1) for x in (q, k))
    q = q * (keys**-0.5 if scale is None else scale)
    plus = softplus(a + dt_bias, softplus_beta, softplus_threshold)
    log_decay = (-torch.exp(A_log) * plus)[..., None, None]
    beta = sigmoid(b)[..., None]
    length = tokens // max(count, 1)
    pieces = [(n * length, n * length + length) for n in range(count)]
    if cu_seqlens is not None:
        pieces = spans(cu_seqlens, tokens, "cu_seqlens")
    table = state_indices.tolist()
    by_token = state_indices.dim() == 2
    accepted = [0] * count if num_accepted_tokens is None else num_accepted_tokens.tolist()
    # A sequence whose slot is -1 is skipped, and its other values are ignored.
    first_slots = [
        row[min(max(n, 1), len(row)) - 1] if by_token else row
        for row, n in zip(table, accepted, strict=True)
    ]
    there = [n for n, slot in enumerate(first_slots) if slot != -1]
    own_slots = [table[n] if by_token else [table[n]] for n in there]
    need(all(-1 <= slot < slots for row in own_slots for slot in row), "state_indices")
    rows = list(range(count)) if intermediate_states is not None else [-1] * count
    if intermediate_state_indices is not None:
        rows = intermediate_state_indices.tolist()
        used = [rows[n] for n in there]
        need(all(-1 <= r < len(intermediate_states) for r in used), "intermediate_state_indices")
        used = [r for r in used if r >= 0]
        need(len(set(used)) == len(used), "intermediate_state_indices")
    steps = state_indices.shape[1] if by_token else 10**9
    if intermediate_states is not None:
        steps = intermediate_states.shape[1]
    need(all(pieces[n][1] - pieces[n][0] <= steps for n in there), "cu_seqlens")
    if not disable_state_update:
        seen = set()
        for row in own_slots:
            own = {slot for slot in row if slot >= 0}
            need(not own & seen, "state_indices")
            seen |= own
    if num_accepted_tokens is not None:
        least = 1 if by_token else 0
        need(all(least <= accepted[n] <= steps for n in there), "num_accepted_tokens")
        need(all(by_token or not accepted[n] or rows[n] >= 0 for n in there),
             "intermediate_state_indices")  # fmt: skip
    stored = (lambda m: m.mT) if state_v_first else (lambda m: m)
    o, new = torch.zeros_like(v), state.clone()
    kept = None if intermediate_states is None else intermediate_states.clone()
    for n, (begin, end) in enumerate(pieces):
        own = table[n] if by_token else [table[n]] * (end - begin)
        first = first_slots[n]
        if begin == end or first < 0:
            continue
        source = state[first]
        if not by_token and accepted[n]:
            source = intermediate_states[rows[n], accepted[n] - 1]
        matrix = stored(source)
        for i, t in enumerate(range(begin, end)):
            matrix, o[t] = delta_rule(matrix, q[t], k[t], v[t], beta[t], log_decay[t])
            if kept is not None and rows[n] >= 0:
                kept[rows[n], i] = stored(matrix)
            last = t == end - 1
            if not disable_state_update and own[i] >= 0 and (by_token or last):
                new[own[i]] = stored(matrix)
    outs = [Out(o), Out(new, "state")]
    return outs if kept is None else [*outs, Out(kept, "intermediate_states")]


# Calls to draw


RULE = {
    "batch": (1, 2), "tokens": (3, 1, 2, 5, 0), "lengths": LENGTHS, "index": INDEX,
    "heads": (1, 2), "group": (1, 2, 3), "keys": (4, 1, 3, 8, 16), "values": (4, 1, 3, 8, 16),
    "state": NO, "final": NO, "norm": NO, "gate": NO, "bias": NO, "sigmoid": NO, "neg": NO,
    "v_first": NO, "scale": (None, 1.0, 0.0, -0.5), "dtype": DTYPES, "gates": ("same", "float32"),
    "broken": NO, "behind": (0, 1, 5),
}  # fmt: skip


def rule_arguments(s, draw):
    batch, tokens, starts = packed(s, draw)
    heads, value_heads, dtype = s["heads"], s["heads"] * s["group"], s["dtype"]
    wide = "float64" if dtype == "float64" else "float32"
    gates = dtype if s["gates"] == "same" else wide
    count = batch if starts is None else len(starts) - 1
    shape = (batch, tokens, value_heads)
    q, k = (draw.normal(batch, tokens, heads, s["keys"], dtype="float64") for _ in range(2))
    if not s["norm"]:  # models give keys of length 1; with longer ones the state explodes
        q, k = unit(q, 1e-6), unit(k, 1e-6)
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
    if s["broken"] and arguments["v"].numel():  # the NaN must not reach other sequences
        arguments["v"][0, 0] = NAN
    if s["gate"]:
        arguments["A_log"] = draw.normal(value_heads, dtype=wide) - 2
        if s["bias"]:
            arguments["dt_bias"] = draw.normal(value_heads, dtype=wide)
    return arguments


def make_chunk(s, draw):
    if s["long"] and s["lengths"] is None:
        s = s | {"tokens": 60 + s["tokens"]}
    chosen = {"chunk_size": s["chunk"], "return_intermediate_states": s["before"]}
    return rule_arguments(s, draw) | chosen | ranks(s)


def make_kda(s, draw):
    if s["long"] and s["lengths"] is None:
        s = s | {"tokens": 60 + s["tokens"]}
    arguments = rule_arguments(s, draw)
    shape, dtype = (*arguments["g"].shape, s["keys"]), str(arguments["g"].dtype)[6:]
    if s["gate"]:
        arguments["g"] = draw.normal(*shape, dtype=dtype)
        arguments["lower_bound"] = s["bound"]
        if s["bias"]:
            wide = "float64" if s["dtype"] == "float64" else "float32"
            arguments["dt_bias"] = draw.normal(shape[2] * shape[3], dtype=wide)
    else:
        arguments["g"] = -draw.uniform(0, s["strong"], *shape, dtype=dtype)
    is_safe = s["safe"] and (s["bound"] is not None or not s["gate"])
    return arguments | {"chunk_size": s["chunk"], "safe_gate": is_safe}


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
        "use_qk_l2norm_in_kernel": s["norm"], "softplus_beta": s["bend"],
        "softplus_threshold": s["threshold"],
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
    if s["hide"]:  # invalid values of skipped sequences, which must not be read
        skipped = (indices == -1).view(count, -1).all(1)
        for name in ("num_accepted_tokens", "intermediate_state_indices"):
            if name in arguments:
                arguments[name][skipped] = 77
    return arguments


def pool_forms(name, s):
    """Return the forms of an argument: states may have gaps between them, but each is dense."""
    return ("dense", "inside", "apart") if name in ("state", "intermediate_states") else None


TARGETS = {
    "chunk_gated_delta_rule": Target(
        chunk_gated_delta_rule,
        dict(chunk=(64, 16, 32), long=NO, before=NO, ranks=RANKS, **RULE), make_chunk,
        ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"),
        indices=("cu_seqlens",), roundings=256, loose=True, inference=lambda s: s["before"],
        tokens=("q", "k", "v", "g", "beta"),
    ),
    "chunk_kda": Target(
        chunk_kda,
        dict(
            chunk=(64, 16, 32, 1), long=NO, strong=(1, 30), bound=(None, -5.0), safe=NO, **RULE
        ),
        make_kda,
        ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"),
        indices=("cu_seqlens",), roundings=256, loose=True, tokens=("q", "k", "v", "g", "beta"),
    ),
    "fused_recurrent_gated_delta_rule": Target(
        fused_recurrent_gated_delta_rule,
        dict(
            beta=("by head", "by value", "none"), decays=("g", "", "gk", "kv", "gkv"), **RULE
        ),
        make_recurrent,
        ("q", "k", "v", "g", "gk", "gv", "beta", "initial_state", "A_log", "dt_bias"),
        indices=("cu_seqlens",), roundings=256, tokens=("q", "k", "v", "g", "gk", "gv", "beta"),
    ),
    "gated_delta_rule_update": Target(
        gated_delta_rule_update,
        dict(
            batch=(2, 1, 3), tokens=(1, 2, 3, 0), spare=(0, 1, 2),
            lengths=LENGTHS, index=INDEX,
            heads=(1, 2), group=(1, 2), keys=(4, 1, 3, 16), values=(4, 1, 3, 16), v_first=NO,
            verify=("no", "sglang", "vllm"), accepted=NO, rows=NO, skip=NO, split=NO, disable=NO,
            norm=YES, small_pool=NO, scale=(None, 1.0), dtype=DTYPES, hide=NO,
            bend=(1.0, 0.5, 3.0), threshold=(20.0, 0.0, 2.0, 1e9),
        ),
        make_rule_update,
        writes=lambda s: ("state", "intermediate_states"),
        indices=(
            "state_indices", "cu_seqlens", "num_accepted_tokens", "intermediate_state_indices",
        ),
        forms=pool_forms, roundings=256,
    ),
}  # fmt: skip
