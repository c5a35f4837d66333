"""A double of fla_npu: the signatures of its operators of August 2026, computed by torch."""

import sys
import types

import torch

from npu_ops.core import library


def npu_recurrent_gated_delta_rule(
    query, key, value, state, *, beta, scale=1.0, actual_seq_lengths, ssm_state_indices,
    num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """Updates `state` in place; the first length is of tokens that are of no sequence."""
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
    """x [B, T, D], weight [W, D], conv_states [B, W - 1, D], without initial states."""
    width, channels = weight.shape
    assert run_mode == 0 and conv_states.shape == (x.shape[0], width - 1, channels)
    before = torch.cat([torch.zeros_like(conv_states), x], 1).float().transpose(1, 2)
    taps = weight.float().t()[:, None]
    y = torch.nn.functional.conv1d(
        before, taps, None if bias is None else bias.float(), groups=channels
    )
    y = torch.nn.functional.silu(y) if activation_mode else y
    return y.transpose(1, 2).to(x.dtype)


def install(monkeypatch, **changed):
    """Make `import fla_npu` find it. changed: other operators by their names, or None for none."""
    operators = {
        f.__name__: f for f in (npu_recurrent_gated_delta_rule, npu_causal_conv1d)
    } | changed
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
