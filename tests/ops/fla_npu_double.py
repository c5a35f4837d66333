"""A stand-in for fla_npu: its operators' signatures of August 2026, computed with torch."""

import sys
import types

import torch

from npu_ops.core import library


def npu_recurrent_gated_delta_rule(
    query, key, value, state, *, beta, scale=1.0, actual_seq_lengths, ssm_state_indices,
    num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """Update `state` in place. actual_seq_lengths: a 0, then the sequences' lengths."""
    assert {x.dtype for x in (query, key, value, state, beta)} == {torch.bfloat16}
    assert g.dtype == torch.float32 and ssm_state_indices.dtype == torch.int32
    begin, *lengths = actual_seq_lengths.tolist()
    assert begin == 0 and sum(lengths) == len(query)
    times, out = value.shape[1] // query.shape[1], torch.empty_like(value)
    q, k = (x.float().repeat_interleave(times, 1) for x in (query, key))
    for n, length in enumerate(lengths):
        slots = ssm_state_indices[begin : begin + length].tolist()
        matrix = state[slots[int(num_accepted_tokens[n]) - 1]].float()
        for t in range(begin, begin + length):
            matrix = matrix * g[t].exp()[:, None, None]
            error = value[t].float() - (matrix @ k[t, :, :, None])[..., 0]
            matrix = matrix + (beta[t].float()[:, None] * error)[..., None] * k[t, :, None]
            out[t] = (matrix @ (q[t] * scale)[:, :, None])[..., 0]
            state[slots[t - begin]] = matrix.bfloat16()
        begin += length
    return out


def npu_causal_conv1d(
    x, weight, bias=None, conv_states=None, *, query_start_loc=None, cache_indices=None,
    initial_state_mode=None, num_accepted_tokens=None, activation_mode=0, pad_slot_id=-1,
    run_mode=0, head_num=0,
):  # fmt: skip
    """Return y [B, T, D]. x [B, T, D], weight [W, D], conv_states [B, W - 1, D].

    The convolution starts from zeros; the values of conv_states are neither read nor written.
    """
    width, channels = weight.shape
    assert run_mode == 0 and conv_states.shape == (x.shape[0], width - 1, channels)
    before = torch.cat([torch.zeros_like(conv_states), x], 1).float().transpose(1, 2)
    taps = weight.float().t()[:, None]
    y = torch.nn.functional.conv1d(
        before, taps, None if bias is None else bias.float(), groups=channels
    )
    y = torch.nn.functional.silu(y) if activation_mode else y
    return y.transpose(1, 2).to(x.dtype)


def in_chunks(x, chunk_size):
    """Return `[B, H, T, ..]` as fp32 `[B, H, chunks, chunk_size, ..]`."""
    return x.float().unflatten(2, (-1, chunk_size))


def npu_chunk_local_cumsum(
    g, chunk_size, *, cu_seqlens=None, chunk_indices_out=None, reverse=False, scale=1.0,
    head_first=True, output_dtype="float32",
):  # fmt: skip
    """Return the sums of g [B, H, T] within each chunk, from its first token on."""
    assert head_first and g.dim() == 3 and g.is_contiguous()
    return in_chunks(g, chunk_size).cumsum(3).flatten(2, 3)


def npu_chunk_scaled_dot_kkt(k, g, beta, *, cu_seqlens=None, chunk_indices=None, chunk_size=64):
    """Return beta * decay * (k k^T) of each chunk, strictly lower triangular.

    The result is fp32 [B, HV, T, chunk_size].
    """
    assert {g.dtype, beta.dtype} == {torch.float32} and g.shape == beta.shape
    k = in_chunks(k.repeat_interleave(g.shape[1] // k.shape[1], 1), chunk_size)
    g, beta = (in_chunks(x, chunk_size) for x in (g, beta))
    decay = (g[..., :, None] - g[..., None, :]).clamp(-50, 50).exp()
    return ((k @ k.mT) * decay * beta[..., None]).tril(-1).flatten(2, 3)


def npu_solve_tri(x, *, cu_seqlens=None, chunk_indices=None, layout="bsnd"):
    """Return the inverse of I + x for each chunk, in x's dtype."""
    assert layout == "bnsd" and x.dtype in (torch.bfloat16, torch.float16)
    matrix = in_chunks(x, x.shape[3])
    one = torch.eye(x.shape[3]).expand(matrix.shape)
    found = torch.linalg.solve_triangular(one + matrix, one, upper=False, unitriangular=True)
    return found.flatten(2, 3).to(x.dtype)


def npu_recompute_w_u_fwd(
    k, v, beta, A, chunk_size, *, g=None, gk=None, cu_seqlens=None, chunk_indices=None
):
    """Return w [B, HV, T, K], and u with v's shape."""
    assert A.dtype == k.dtype == v.dtype and A.shape == (*v.shape[:3], chunk_size)
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1).float() * g.exp()[..., None]
    A = in_chunks(A, chunk_size)
    of = (in_chunks(x.float() * beta[..., None], chunk_size) for x in (k, v))
    return tuple((A @ x).flatten(2, 3).to(v.dtype) for x in of)


def npu_chunk_gated_delta_rule_fwd_h(
    k, w, u, g=None, *, gk=None, initial_state=None, output_final_state=False, chunk_size=None,
    cu_seqlens=None, chunk_indices=None, state_v_first=False,
):  # fmt: skip
    """Return the states before each chunk, in k's dtype, the new values, and the last states."""
    assert not state_v_first and chunk_size == 64
    batch, heads, _, values = u.shape
    k = k.repeat_interleave(heads // k.shape[1], 1)
    state = (
        torch.zeros(batch, heads, k.shape[3], values) if initial_state is None else initial_state
    )
    states, changed, state = [], [], state.float()
    for n in range(u.shape[2] // chunk_size):
        of = slice(n * chunk_size, (n + 1) * chunk_size)
        states.append(state.to(k.dtype))
        changed.append((u[:, :, of].float() - w[:, :, of].float() @ states[-1].float()).to(u.dtype))
        to_end = (g[:, :, of][..., -1:] - g[:, :, of]).exp()[..., None]
        keys = k[:, :, of].float() * to_end
        state = state * g[:, :, of][..., -1].exp()[..., None, None]
        state = state + keys.mT @ changed[-1].float()
    return torch.stack(states, 2), torch.cat(changed, 2), state if output_final_state else None


def npu_chunk_fwd_o(
    q, k, v, h, scale, *, g=None, g_gamma=None, cu_seqlens=None, chunk_indices=None,
    chunk_size=None, transpose_state_layout=False,
):  # fmt: skip
    """Return o with v's shape: what the state before a chunk adds, plus attention in the chunk."""
    assert h.shape == (*v.shape[:2], v.shape[2] // chunk_size, q.shape[3], v.shape[3])
    times = v.shape[1] // q.shape[1]
    q, k = (in_chunks(x.repeat_interleave(times, 1), chunk_size) for x in (q, k))
    values, g = in_chunks(v, chunk_size), in_chunks(g, chunk_size)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp()
    own = ((q @ k.mT) * decay).tril() @ values
    before = (q * g.exp()[..., None]) @ h.float()
    return ((own + before) * scale).flatten(2, 3).to(v.dtype)


def install(monkeypatch, **changed):
    """Make `import fla_npu` find this stand-in.

    changed: replacements of operators by name, None to remove one.
    """
    operators = {name: f for name, f in globals().items() if name.startswith("npu_")} | changed
    operators = {name: f for name, f in operators.items() if f is not None}
    ascendc = types.ModuleType("fla_npu.ops.ascendc")
    ascendc.ASCENDC_CTYPES_OPS = operators
    vars(ascendc).update(operators)
    package = types.ModuleType("fla_npu")
    package.__spec__ = types.SimpleNamespace(name="fla_npu")
    for name, module in (
        ("", package),
        (".ops", types.ModuleType("ops")),
        (".ops.ascendc", ascendc),
    ):
        monkeypatch.setitem(sys.modules, f"fla_npu{name}", module)
    library.fla_npu_why_not.cache_clear()
