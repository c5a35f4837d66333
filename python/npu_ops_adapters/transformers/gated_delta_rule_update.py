"""A decoding step of Gated Delta Net: gates, norms of q and k and the delta rule are one launch.

transformers computes the gates and hands the rule a new state, which the cache copies. Here the
step between the projections is the convolution, the rule, which writes the cache's state, and the
gated norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, env, make
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import causal_conv1d_update, models

_NAMES = ("self", "hidden_states", "cache_params", "attention_mask", "kwargs")


def patches() -> Iterable[Patch]:
    """The layer's `forward`, where a cache says what it knows of a layer (5.23)."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if hasattr(cache, "get_conv_state"):
        for model, name in models.delta_net_classes("GatedDeltaNet").items():
            yield from models.replaced(
                (model,), f"{name}.forward", "gated_delta_rule_update", ours, _NAMES
            )


def ours(module, hidden_states, cache_params=None, attention_mask=None, **unread) -> Callable:
    """Return the npu-ops call for this call of transformers: one more token of each sequence.

    With NPU_OPS_CONSISTENT the rule's own function decides.
    """
    x = hidden_states
    check_device(x)
    if cache_params is None or x.dim() != 3 or x.shape[1] != 1 or env.settings.consistent:
        raise ValueError("hidden_states: got tokens of another step, needs one behind a cache")
    check.alone("a decoding step", attention_mask=attention_mask)
    if torch.is_grad_enabled() and any(p.requires_grad for p in (x, *module.parameters())):
        raise ValueError("hidden_states: got one that needs a gradient, needs torch.no_grad()")
    layer = module.layer_idx
    conv, state = cache_params.get_conv_state(layer), cache_params.get_recurrent_state(layer)
    if conv is None or state is None or cache_params.is_recording_past(layer):
        raise ValueError("cache_params: got one without this layer's states, needs them")
    if hasattr(module.conv1d, "_hf_hook"):
        raise ValueError("conv1d: got a filter that accelerate moves, needs one that stays")
    check.one_of("recurrent_state's dtype", state.dtype, (torch.float32, torch.bfloat16))
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    qkv, *others = _projected(module, x)
    convolved = causal_conv1d_update.ours(qkv.mT, conv, weight, bias, module.activation)
    return functools.partial(_step, module, x, convolved, *others, state)


def _step(module, x, convolved: Callable, z, b, a, state):
    """transformers' states are `[B, HV, K, V]`; both are written."""
    o = npu_ops.gated_delta_rule_update(
        convolved()[..., 0], a[:, 0], b[:, 0], module.A_log, module.dt_bias, state,
        make.counted(x.shape[0], device=x.device), state_v_first=False,
    )  # fmt: skip
    o = module.norm(o.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    return module.out_proj(o.view(*x.shape[:2], -1))


def _projected(module, x):
    """q, k and v of a token one after the other, z, b and a; `[B, 1, ...]`."""
    if hasattr(module, "in_proj_qkv"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return [getattr(module, name)(x) for name in names]
    qkvz, ba = module.in_proj_qkvz(x), module.in_proj_ba(x)
    q, k, v, *others = module.fix_query_key_value_ordering(qkvz, ba)
    return torch.cat([part.flatten(2) for part in (q, k, v)], -1), *others
