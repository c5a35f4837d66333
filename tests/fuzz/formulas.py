"""The operators' mathematics in fp64, by the public functions' names and arguments.

Written from the papers and docstrings, without npu_ops: token by token, sequence by sequence. Each
takes the arguments of the public function, floating tensors in fp64, and returns a list of `Out`.
Autograd of it is the gradient that is expected. Index values that the docstrings exclude raise
`Refused`.
"""

from __future__ import annotations

import dataclasses

import torch

WIDE = torch.float64


class Refused(Exception):
    """The arguments have no meaning; says which of them."""


class Unspecified(Exception):
    """The docstring leaves open what comes out; only that nothing breaks can be asked."""


@dataclasses.dataclass
class Out:
    """A result. argument: of which argument these are the contents afterwards, if of one.

    known: bool, broadcast to the value, which elements are specified; None: all.
    """

    value: torch.Tensor | None
    argument: str | None = None
    known: torch.Tensor | None = None


def need(condition: bool, argument: str) -> None:
    if not condition:
        raise Refused(argument)


def spans(starts, tokens: int, name: str, *, whole: bool = True) -> list[tuple[int, int]]:
    """Where each packed sequence begins and ends. whole: they cover all tokens."""
    starts = starts.tolist()
    need(starts[0] == 0, name)
    need(starts[-1] == tokens if whole else starts[-1] <= tokens, name)
    pairs = list(zip(starts, starts[1:], strict=False))
    need(all(begin <= end for begin, end in pairs), name)
    return pairs


# Norms and gates


def softplus(x):
    """torch's, which models are trained with: from 20 on its argument itself."""
    return torch.where(x > 20, x, x.clamp_min(0) + torch.log1p(torch.exp(-x.abs())))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def unit(x, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def l2norm(x, eps=1e-6, output_dtype=None, dim=-1):
    return [Out(unit(x, eps))]


def rms_norm_gated(
    x, weight, z, eps=1e-6, norm_before_gate=True, activation="silu", group_size=None
):
    gate = sigmoid(z) * (z if activation == "silu" else 1)
    y = x if norm_before_gate else x * gate
    if y.numel():
        groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
        square = (groups * groups).mean(-1, keepdim=True)
        y = (groups / torch.sqrt(square + eps)).flatten(-2) * weight
    return [Out(y * gate if norm_before_gate else y)]


def gdn_gate(a, A_log, dt_bias=None, b=None, allow_neg_eigval=False):
    raw = a if dt_bias is None else a + dt_bias
    g = Out(-torch.exp(A_log) * softplus(raw))
    return [g] if b is None else [g, Out(sigmoid(b) * (2 if allow_neg_eigval else 1))]


def drawn(p: float) -> float:
    """The probability of dropping that 16 bits can have: never all or nothing."""
    return min(max(round(p * 65536), 1), 65535) / 65536


def bias_dropout_add(
    x, bias, residual, p, training, dtype=None, inplace=False, generator=None, keep=None
):
    total = x if bias is None else x + bias
    if keep is not None:
        total = total * keep / (1 - drawn(p))
    return [Out(residual + total, "x" if inplace else None)]


# Convolution


def silu(y, activation):
    return y if activation is None else y * sigmoid(y)


def convolved(rows, weight, bias, activation):
    """`[W - 1 + T, D]` rows, of which the last T are tokens, as `[T, D]`."""
    width = weight.shape[1]
    tokens = rows.shape[0] - (width - 1)
    y = sum(rows[j : j + tokens] * weight[:, j] for j in range(width))
    return silu(y if bias is None else y + bias, activation)


def sequences_of(x, cu_seqlens):
    """`[T, D]` of each sequence."""
    if cu_seqlens is None:
        return list(x)
    return [x[0, b:e] for b, e in spans(cu_seqlens, x.shape[1], "cu_seqlens")]


def causal_conv1d(
    x, weight, bias=None, residual=None, initial_state=None, output_final_state=False,
    activation=None, cu_seqlens=None,
):  # fmt: skip
    width, ys, finals = weight.shape[1], [], []
    for n, tokens in enumerate(sequences_of(x, cu_seqlens)):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].T
        rows = torch.cat([before, tokens])
        ys.append(convolved(rows[1:], weight, bias, activation))
        finals.append(rows[len(rows) - width :].T)
    y = torch.cat([x.new_zeros(0, x.shape[2]), *ys]).view(x.shape)
    y = y if residual is None else y + residual
    finals = torch.stack(finals) if finals else x.new_zeros(0, x.shape[2], width)
    return [Out(y), Out(finals if output_final_state else None)]


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
    flat = x.reshape(-1, channels)
    if query_start_loc is not None:
        pieces = spans(query_start_loc, len(flat), "query_start_loc", whole=False)
    else:
        length = 1 if x.dim() == 2 else x.shape[1]
        pieces = [(n * length, n * length + length) for n in range(x.shape[0])]
    count = len(pieces)
    slot_of = list(range(count)) if conv_state_indices is None else conv_state_indices.tolist()
    real = [slot for slot in slot_of if slot != pad_slot_id or conv_state_indices is None]
    need(all(0 <= slot < slots for slot in real), "conv_state_indices")
    need(len(set(real)) == len(real), "conv_state_indices")
    row_of = list(range(count))
    if intermediate_state_indices is not None:
        row_of = intermediate_state_indices.tolist()
        rows = len(intermediate_conv_window)
        kept = [row for row in row_of if row != -1]
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


# Rotary embedding


def rotated(x, cos, sin, pair_layout, inverse):
    """x `[..., D]` by full-width cos, sin `[..., R]` in the order of the pairs."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    if pair_layout == "half":
        turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
    else:
        turned = torch.stack([-part[..., 1::2], part[..., 0::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * (-sin if inverse else sin), rest], -1)


def full_width(table, width, pair_layout):
    """A half-width table has the angle of both of a pair."""
    if table.shape[-1] == width:
        return table
    return (
        torch.cat([table, table], -1) if pair_layout == "half" else table.repeat_interleave(2, -1)
    )


def over_heads(table, layout):
    """`[B, S, R]` to multiply a tensor of `layout`."""
    match layout:
        case "TND":
            return table[0, :, None]
        case "SBND":
            return table.transpose(0, 1)[:, :, None]
        case "BSND":
            return table[:, :, None]
    return table[:, None]


def rotate_both(q, k, cos, sin, layout, pair_layout, inverse, inplace):
    """cos, sin: `[B or 1, S, R]`, a token's own."""
    cos, sin = (over_heads(table, layout) for table in (cos, sin))
    return [
        Out(None if x is None else rotated(x, cos, sin, pair_layout, inverse), name)
        for x, name in (
            (q, "q" if inplace else None),
            (k, "k" if inplace and k is not None else None),
        )
    ]


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
        rows = torch.tensor([[t for begin, end in pieces for t in range(end - begin)]]).long()
    elif position_ids is not None and cos.dim() == 2:
        rows = position_ids.long()
        rows = rows if rows.dim() == 2 else rows[None]
        inside = bool(((rows >= 0) & (rows < len(cos))).all())
        need(inside, "position_ids")
    if rows is not None:
        tables = [table[rows] for table in tables]
    tables = [table if table.dim() == 3 else table[None] for table in tables]
    return rotate_both(q, k, *tables, layout, pair_layout, inverse, inplace)


def apply_rotary_pos_emb_freqs(
    q, k, freqs, layout="SBND", pair_layout="half", mscale=1.0, cu_seqlens=None, max_seqlen=None,
    cp_size=1, cp_rank=0, inverse=False, inplace=False,
):  # fmt: skip
    cos, sin = (torch.cos(freqs) * mscale, torch.sin(freqs) * mscale)
    tables = [table.squeeze(2).transpose(0, 1) for table in (cos, sin)]
    known = None
    if cu_seqlens is not None:
        rows, tokens = [], q.shape[0]
        per_token = (
            len(freqs) > max_seqlen if max_seqlen is not None else (len(freqs) == tokens * cp_size)
        )
        pieces = spans(cu_seqlens, tokens * cp_size, "cu_seqlens", whole=False)
        for begin, end in pieces:
            if cp_size > 1 and (end - begin) % (2 * cp_size):
                raise Unspecified
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
        known = torch.arange(tokens)[:, None, None] < len(rows)
        rows = torch.tensor(rows + [0] * (tokens - len(rows))).long()
        tables = [table[:, rows] for table in tables]
    outs = rotate_both(q, k, *tables, layout, pair_layout, inverse, inplace)
    for out in outs:
        out.known = known
    return outs


def owner(sections, section_layout):
    """Which of T, H and W owns each frequency."""
    t, h, w = sections
    if section_layout == "chunked":
        return [0] * t + [1] * h + [2] * w
    owners = [0] * (t + h + w)
    for axis, size in ((1, h), (2, w)):
        for n in range(size):
            owners[3 * n + axis] = axis
    return owners


def pick_axes(tables, sections, section_layout, pair_layout):
    """`[3, B, S, W]` as `[B, S, W]`."""
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


# The gated delta rule


def delta_rule(state, q, k, v, beta, log_decay):
    """One token: state `[HV, K, V]`, q and k `[HV, K]`, v `[HV, V]`, beta `[HV, 1 or V]`."""
    state = state * torch.exp(log_decay)
    recalled = torch.einsum("hkv,hk->hv", state, k)
    state = state + torch.einsum("hk,hv->hkv", k, beta * (v - recalled))
    return state, torch.einsum("hkv,hk->hv", state, q)


def gated_delta_rule(
    q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
    use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
    state_v_first, cu_seqlens,
):  # fmt: skip
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
    o, finals = {}, []
    for n, (b, begin, end) in enumerate(pieces):
        state = v.new_zeros(value_heads, keys, values)
        if initial_state is not None:
            state = initial_state[n].mT if state_v_first else initial_state[n]
        for t in range(begin, end):
            state, o[b, t] = delta_rule(state, *(x[b, t] for x in (q, k, v, beta, log_decay)))
        finals.append(state.mT if state_v_first else state)
    flat = [o[b, t] for b in range(batch) for t in range(length)]
    out = torch.stack(flat).view(v.shape) if flat else torch.zeros_like(v)
    shape = (0, value_heads, *((values, keys) if state_v_first else (keys, values)))
    final = torch.stack(finals) if finals else v.new_zeros(shape)
    return [Out(out), Out(final if output_final_state else None)]


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
    chunk_size=64,
):  # fmt: skip
    return gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, cu_seqlens,
    )  # fmt: skip


def gated_delta_rule_update(
    qkv, a, b, A_log, dt_bias, state, state_indices, state_v_first, cu_seqlens=None,
    num_accepted_tokens=None, intermediate_states=None, intermediate_state_indices=None,
    disable_state_update=False, scale=None, use_qk_l2norm_in_kernel=True,
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
    log_decay = (-torch.exp(A_log) * softplus(a + dt_bias))[..., None, None]
    beta = sigmoid(b)[..., None]
    length = tokens // max(count, 1)
    pieces = [(n * length, n * length + length) for n in range(count)]
    if cu_seqlens is not None:
        pieces = spans(cu_seqlens, tokens, "cu_seqlens", whole=False)
    table = state_indices.tolist()
    by_token = state_indices.dim() == 2
    every = [slot for row in table for slot in (row if by_token else [row])]
    need(all(-1 <= slot < slots for slot in every), "state_indices")
    rows = list(range(count)) if intermediate_states is not None else [-1] * count
    if intermediate_state_indices is not None:
        rows = intermediate_state_indices.tolist()
        need(all(-1 <= r < len(intermediate_states) for r in rows), "intermediate_state_indices")
        used = [r for r, slot in zip(rows, table, strict=True) if r >= 0 and slot >= 0]
        need(len(set(used)) == len(used), "intermediate_state_indices")
    steps = state_indices.shape[1] if by_token else 10**9
    if intermediate_states is not None:
        steps = intermediate_states.shape[1]
    need(all(end - begin <= steps for begin, end in pieces), "cu_seqlens")
    if not disable_state_update:
        seen = set()
        for row in table:
            own = {slot for slot in (row if by_token else [row]) if slot >= 0}
            need(not own & seen, "state_indices")
            seen |= own
    accepted = [0] * count if num_accepted_tokens is None else num_accepted_tokens.tolist()
    if num_accepted_tokens is not None:
        need(all((1 if by_token else 0) <= n <= steps for n in accepted), "num_accepted_tokens")
        need(all(by_token or not n or r >= 0 for n, r in zip(accepted, rows, strict=True)),
             "intermediate_state_indices")  # fmt: skip
    stored = (lambda m: m.mT) if state_v_first else (lambda m: m)
    o, new = torch.zeros_like(v), state.clone()
    kept = None if intermediate_states is None else intermediate_states.clone()
    for n, (begin, end) in enumerate(pieces):
        own = table[n] if by_token else [table[n]] * (end - begin)
        first = table[n][max(accepted[n] - 1, 0)] if by_token else table[n]
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


# Attention


def softmax_rows(q, k, v, *, scale, left, right, shift, softcap, bias, mask, sinks, keep, p):
    """`[N, Sq, Dv]` and `[N, Sq]` of one sequence; q, k and v `[N, S, D]`."""
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
    return torch.einsum("nqk,nkd->nqd", weights, v), lse[..., 0]


def in_heads(x, layout, heads):
    """Any dense layout as `[B, N, S, D]`; TND as `[1, N, T, D]`."""
    if layout in ("BSH", "SBH"):
        x, layout = x.unflatten(2, (heads, -1)), layout[:2] + "ND"
    if layout == "TND":
        x, layout = x[None], "BSND"
    return x.permute([layout.index(axis) for axis in "BNSD"])


def from_heads(x, layout):
    """The inverse of `in_heads`."""
    order = {"BSH": "BSND", "SBH": "SBND", "TND": "BSND"}.get(layout, layout)
    x = x.permute(["BNSD".index(axis) for axis in order])
    x = x[0] if layout == "TND" else x
    return x.flatten(2) if layout in ("BSH", "SBH") else x


def cache_keys(cache, layout, blocks, length, heads):
    """`[N, length, D]` of a paged cache; the blocks behind the length mean nothing."""
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
    if layout == "TND":
        out = (
            torch.cat([o for o, _ in found], 1)[None]
            if found
            else wide_q.new_zeros(1, heads, 0, dim)
        )
        lse = torch.cat([s for _, s in found], 1)
    else:
        shape = wide_q.shape[:3]
        out = torch.stack([o for o, _ in found]) if found else wide_q.new_zeros(*shape, dim)
        lse = torch.stack([s for _, s in found]) if found else wide_q.new_zeros(shape)
    outs = [Out(from_heads(out, layout))]
    return [*outs, Out(lse)] if return_lse else outs


def q_dim_scale(q, scale):
    return q.shape[3] ** -0.5 if scale is None else scale
