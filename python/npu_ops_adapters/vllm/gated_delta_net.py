"""The core of a Gated Delta Net layer: from the convolution to the delta rule, for all sequences.

vllm-ascend runs five kernels for a decoding step: a convolution, gates, two norms and the delta
rule. npu-ops runs two. For a prefill vllm-ascend 0.18.0 copies lengths, slots and flags to the host
in each layer, so it waits for the device three times. npu-ops leaves them on the device.

A layer's cache is two pools:

- `[slots, L, D]`, for the convolution. The first W - 1 rows of a slot are the convolution's last
  inputs; W is the filter's width. The rows behind them are for draft tokens.
- `[slots, HV, ...]`, for the delta rule. Whether a state is `[keys, values]` or `[values, keys]`
  depends on vllm-ascend's source; `FORMS` lists the known methods.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

import npu_ops
from npu_ops.core import check, env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import (
    check_device,
    committed,
    padded,
    read_slots,
    tokens_of_sequences,
    write_slots,
)
from npu_ops_adapters.vllm import functions

WORKER = "vllm_ascend.patch.worker"


class Form(NamedTuple):
    """Properties of a method of vllm-ascend.

    v_first: states are `[values, keys]`.
    sends: the method ends by offering the layer's cache to a connector; otherwise its caller does.
    """

    v_first: bool
    sends: bool


FORMS = {  # keys: functions.fingerprint of the method
    "80244a73f191": Form(v_first=True, sends=False),  # 0.18.0, Qwen3-Next
    "cac3fc628c6a": Form(v_first=False, sends=True),  # 0.18.0, Qwen3.5
    "f43d67398356": Form(v_first=True, sends=False),  # 0.23.0
    "4a063b7c48f2": Form(v_first=True, sends=True),  # main of August 2026
}


def patches() -> Iterable[Patch]:
    """Patch the method that vLLM's operator `gdn_attention_core` calls."""
    for target in _targets():
        yield Patch(
            target=target,
            op="gated_delta_net",
            make=functools.partial(_made, target),
            why="five kernels for a decoding step, and a prefill of 0.18.0 waits for the device",
            signatures=(("self", "mixed_qkv", "b", "a", "core_attn_out"),),
            versions=functions.VERSIONS,
            remove_when="vllm-ascend takes the core of Gated Delta Net from plugins",
        )


def _targets() -> Iterable[str]:
    """Yield the method's name in each vLLM class, as imported by the modules that replace it.

    Before those modules of vllm-ascend have run, the names are those of 0.18.0.
    """
    yield f"{WORKER}.patch_qwen3_next:Qwen3NextGatedDeltaNet._forward_core"
    module = f"{WORKER}.patch_qwen3_5"
    newer = ("_GDN_PATCH_TARGET", "AscendGatedDeltaNetAttention")
    since_0_23 = hasattr(sys.modules.get(module), newer[0])
    for name in newer if since_0_23 else ("Qwen3_5GatedDeltaNet",):
        yield f"{module}:{name}._forward_core"


def _made(target: str, original: Callable) -> Callable:
    """Make the replacement.

    Raises:
        ValueError: the method's source is unknown, so the order of its states is, too.
    """
    form = FORMS.get(functions.fingerprint(original))
    if form is None:
        raise ValueError(f"its source is none of those of {functions.VERSIONS}")
    return functions.made(functools.partial(forward_core, form=form), target, original)


def forward_core(self, mixed_qkv, b, a, core_attn_out, *, form: Form) -> None:
    """Write core_attn_out `[T, HV, V]`, and the layer's pools.

    Args:
        mixed_qkv: `[T, 2 H K + HV V]`, before the convolution. b, a: `[T, HV]`.

    Raises:
        TypeError, ValueError: npu-ops does not support the call; nothing is written yet.
    """
    check_device(mixed_qkv)
    context = sys.modules["vllm.forward_context"].get_forward_context()
    if context.attn_metadata is None:  # vLLM's memory profiling run
        return
    metadata = context.attn_metadata[self.prefix]
    layer = _layer(self, context, form, mixed_qkv)
    tokens = metadata.num_actual_tokens
    x, a, b, out = (y[:tokens] for y in (mixed_qkv, a, b, core_attn_out))
    if metadata.spec_sequence_masks is None:
        out.copy_(_plain(layer, metadata, x, a, b))
    elif not metadata.num_prefills and not metadata.num_decodes:
        out.copy_(_verify(layer, metadata, x, a, b))
    else:
        for part, rows in (
            (_verify, metadata.spec_token_indx), (_plain, metadata.non_spec_token_indx)
        ):  # fmt: skip
            o = part(layer, metadata, *(y.index_select(0, rows) for y in (x, a, b)))
            out.index_copy_(0, rows, o)
    if form.sends:
        sys.modules["vllm_ascend.attention.utils"].maybe_save_kv_layer_to_connector("", [])


class _Layer(NamedTuple):
    """A layer's weights, sizes and pools: conv `[slots, D, L]`, states `[slots, HV, ...]`.

    widths: channels of q, k and v on this rank. heads: head_dim of the keys and of the values.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    widths: tuple[int, int, int]
    heads: tuple[int, int]
    conv: torch.Tensor
    states: torch.Tensor
    v_first: bool


def _layer(module, context, form: Form, x) -> _Layer:
    """Collect a layer's data.

    Raises:
        TypeError, ValueError: npu-ops does not support the layer.
    """
    functions.check_ranks()
    cache = module.kv_cache
    if not isinstance(cache[0], torch.Tensor):  # 0.18.0 has one per engine
        cache = cache[getattr(context, "virtual_engine", 0)]
    conv, states = cache
    v_first = form.v_first
    if env.settings.consistent and not v_first:
        # Use the memory for states with values first, as in training. vllm-ascend's method would
        # read keys first, but never runs in this mode: an unsupported call raises.
        states, v_first = states.view(*states.shape[:2], *states.shape[:1:-1]), True
    keys = module.key_dim // module.tp_size
    layer = _Layer(
        weight=module.conv1d.weight.flatten(1),
        bias=module.conv1d.bias,
        activation="silu" if module.activation is True else module.activation or None,
        A_log=module.A_log,
        dt_bias=module.dt_bias,
        widths=(keys, keys, module.value_dim // module.tp_size),
        heads=(module.head_k_dim, module.head_v_dim),
        conv=conv.transpose(1, 2),
        states=states,
        v_first=v_first,
    )
    matrix = layer.heads[::-1] if layer.v_first else layer.heads
    if conv.shape[2] != x.shape[1] or conv.dtype != x.dtype:
        needs = f"[slots, L, {x.shape[1]}] of {check.short(x.dtype)}"
        raise ValueError(f"conv_state: got {_shown(conv)}, needs {needs}")
    if states.shape[2:] != matrix or states.dtype not in (torch.float32, torch.bfloat16):
        needs = f"[slots, HV, {', '.join(map(str, matrix))}] of float32 or bfloat16"
        raise ValueError(f"ssm_state: got {_shown(states)}, needs {needs}")
    if env.settings.consistent:
        _check_consistent(layer)
    return layer


def _shown(x) -> str:
    return f"{check.short(x.dtype)} {list(x.shape)}"


def _check_consistent(layer: _Layer) -> None:
    """Raise ValueError if a token would not get the bits of training."""
    if env.settings.consistent == "chunks":
        raise ValueError("ssm_state: got states without their unfinished chunks")
    if layer.states.dtype != torch.float32:
        raise ValueError(
            f"ssm_state: got {check.short(layer.states.dtype)}, needs float32 "
            "(--mamba-ssm-cache-dtype float32)"
        )


def _verify(layer: _Layer, metadata, x, a, b) -> torch.Tensor:
    """Process draft tokens. Each sequence has several slots: one for the state after each token.

    Padded sequences of a graph have no tokens; their slots are -1 or vLLM's empty block 0.
    """
    starts, slots = metadata.spec_query_start_loc, metadata.spec_state_indices_tensor
    count = min(starts.shape[0] - 1, slots.shape[0])
    starts, slots = starts[: count + 1], slots[:count]
    accepted = metadata.num_accepted_tokens[:count]
    qkv = npu_ops.causal_conv1d_update(
        x, layer.conv, layer.weight, layer.bias, layer.activation, slots[:, 0], accepted, starts
    )
    with committed():
        return npu_ops.gated_delta_rule_update(
            qkv, a, b, layer.A_log, layer.dt_bias, layer.states, slots,
            state_v_first=layer.v_first, cu_seqlens=starts, num_accepted_tokens=accepted,
        )  # fmt: skip


def _plain(layer: _Layer, metadata, x, a, b) -> torch.Tensor:
    """Process sequences without draft tokens: first those that decode one token, then prefills."""
    slots = metadata.non_spec_state_indices_tensor
    if not metadata.num_prefills:
        return _decode(layer, slots[: x.shape[0]], x, a, b)
    count, tokens = metadata.num_decodes, metadata.num_decode_tokens
    starts, begun = metadata.non_spec_query_start_loc, metadata.has_initial_state
    if not count:
        return _prefill(layer, slots, starts, begun, x, a, b)
    o = _decode(layer, slots[:count], *(y[:tokens] for y in (x, a, b)))
    with committed():
        rest = _prefill(
            layer, slots[count:], starts[count:] - tokens, begun[count:],
            *(y[tokens:] for y in (x, a, b)),
        )  # fmt: skip
    return torch.cat((o, rest))


def _decode(layer: _Layer, slots, x, a, b) -> torch.Tensor:
    """Decode one token of each sequence; rows behind the last slot are padding."""
    count = slots.shape[0]
    tokens = x.shape[0]
    x, a, b = (y[:count] for y in (x, a, b))
    qkv = npu_ops.causal_conv1d_update(
        x, layer.conv, layer.weight, layer.bias, layer.activation, slots
    )
    with committed():
        o = npu_ops.gated_delta_rule_update(
            qkv, a, b, layer.A_log, layer.dt_bias, layer.states, slots, state_v_first=layer.v_first
        )
    return padded(o, tokens)


def _prefill(layer: _Layer, slots, starts, begun, x, a, b) -> torch.Tensor:
    """Process new tokens of packed sequences. begun: whether a sequence has earlier tokens."""
    count = min(starts.shape[0] - 1, slots.shape[0], begun.shape[0])
    starts, slots, begun = starts[: count + 1], slots[:count], begun[:count]
    x, tokens = tokens_of_sequences(x, starts)
    a, b = a[: x.shape[0]], b[: x.shape[0]]
    qkv, _ = npu_ops.causal_conv1d(
        x[None], layer.weight, layer.bias, activation=layer.activation, cu_seqlens=starts,
        conv_state=layer.conv, conv_state_indices=slots, has_initial_state=begun,
    )  # fmt: skip
    with committed():
        parts = zip(
            qkv.split(layer.widths, -1), (*layer.heads[:1] * 2, layer.heads[1]), strict=True
        )
        q, k, v = (y.unflatten(-1, (-1, width)) for y, width in parts)
        g, beta = npu_ops.gdn_gate(a, layer.A_log, layer.dt_bias, b)
        before = read_slots(layer.states, slots).float()
        before = torch.where(begun[:, None, None, None], before, 0)  # a slot may hold NaN
        o, after = npu_ops.chunk_gated_delta_rule(
            q, k, v, g[None], beta[None], initial_state=before, output_final_state=True,
            cu_seqlens=starts, use_qk_l2norm_in_kernel=True, state_v_first=layer.v_first,
        )  # fmt: skip
        write_slots(layer.states, slots, after)
    return padded(o[0], tokens)
