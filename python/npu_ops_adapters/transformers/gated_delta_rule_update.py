"""Computes gates, norms of q and k and the delta rule of a decoding step in one kernel launch.

transformers computes the gates separately, and copies the rule's new state into the cache. npu-ops
needs three launches between the projections: the convolution, the rule and the gated norm. The rule
updates the cache's state in place.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, env, make
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import causal_conv1d_update, models
from npu_ops_adapters.transformers.equivalence import Draw, Variant

_OUTPUT = ("norm", "o_norm"), ("out_proj", "o_proj")
_NAMES = ("self", "hidden_states", "cache_params", "attention_mask", "kwargs")


def patches() -> Iterable[Patch]:
    """Patch the layer's `forward`, if the cache can return a layer's states (5.23)."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if hasattr(cache, "get_conv_state"):
        variant = Variant(ours, _calls, build, reads=("activation", "allow_neg_eigval"))
        having = models.having(models.linear(), models.RULE)
        yield from models.compared_classes(
            having, "GatedDeltaNet", "gated_delta_rule_update", (variant,), _NAMES
        )


# The models' names for a layer's sizes, and the values for small test layers.
_SIZES = {
    "hidden_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def build(cls: type, factor: int) -> torch.nn.Module:
    """Make a small layer with random weights, from its model's configuration."""
    config = typing.get_type_hints(cls.__init__)["config"]().get_text_config()
    for name, size in _SIZES.items():
        setattr(config, name, size * factor)
    config.rms_norm_eps, config.layer_types = 0.1 / factor, ["linear_attention"] * 2
    layer = Draw().fill(cls(config, factor - 1))
    layer.conv1d.weight.mul_(1e-3)  # small, so that the epsilon of q's and k's norms matters
    return layer


class _States:
    """A cache with the states of one layer, for the small calls."""

    def __init__(self, *states: torch.Tensor):
        self.states = states

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor:
        return self.states[0]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor:
        return self.states[1]

    def update_recurrent_state(self, new: torch.Tensor, layer: int) -> None:
        self.states[1].copy_(new)

    def is_recording_past(self, layer: int) -> bool:
        return False


def _calls(cls: type) -> list[tuple]:
    draw, module = Draw(), build(cls, 1)
    channels, width = module.conv1d.weight.shape[0], module.conv1d.weight.shape[2]
    cache = _States(draw.normal(2, channels, width), draw.normal(2, 4, 8, 8))
    return [(module, draw.normal(2, 1, 16), cache)]


def ours(module, hidden_states, cache_params=None, attention_mask=None, **unread) -> Callable:
    """Return the npu-ops call for this call of transformers; hidden_states is `[B, 1, hidden]`.

    With NPU_OPS_CONSISTENT it raises ValueError, so the layer's own `forward` runs and calls the
    rule that is patched for that mode.
    """
    x = hidden_states
    check_device(x)
    if cache_params is None or x.dim() != 3 or x.shape[1] != 1 or env.settings.consistent:
        raise ValueError(
            "hidden_states: got another call than a decoding step, needs one token behind a cache"
        )
    check.alone("a decoding step", attention_mask=attention_mask)
    if torch.is_grad_enabled() and any(p.requires_grad for p in (x, *module.parameters())):
        raise ValueError(
            "hidden_states: got a tensor that requires a gradient, needs torch.no_grad()"
        )
    layer = module.layer_idx
    conv, state = cache_params.get_conv_state(layer), cache_params.get_recurrent_state(layer)
    if conv is None or state is None or cache_params.is_recording_past(layer):
        raise ValueError(
            "cache_params: got a cache without this layer's states, needs these states"
        )
    if hasattr(module.conv1d, "_hf_hook"):
        raise ValueError(
            "conv1d: got a filter that accelerate offloads, needs one that stays on the device"
        )
    check.one_of("recurrent_state's dtype", state.dtype, (torch.float32, torch.bfloat16))
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    qkv, *others = _projected(module, x)
    convolved = causal_conv1d_update.ours(qkv.mT, conv, weight, bias, module.activation)
    return functools.partial(_step, module, x, convolved, *others, state)


def _step(module, x, convolved: Callable, z, b, a, state):
    """Decode one token of each sequence, and update both states in place.

    The rule's state is `[B, HV, K, V]`.
    """
    gates = a[:, 0], b[:, 0], module.A_log, module.dt_bias
    if getattr(module, "allow_neg_eigval", False):
        a, b, *of_decay = gates
        gates = *npu_ops.gdn_gate(a, *of_decay, b, allow_neg_eigval=True), None, None
    o = npu_ops.gated_delta_rule_update(
        convolved()[..., 0], *gates, state, make.counted(x.shape[0], device=x.device),
        state_v_first=False,
    )  # fmt: skip
    norm, projection = (_either(module, *names) for names in _OUTPUT)
    o = norm(o.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    return projection(o.view(*x.shape[:2], -1))


def _either(module, name: str, other: str):
    """Return an attribute that has one of two names."""
    return getattr(module, name) if hasattr(module, name) else getattr(module, other)


def _projected(module, x):
    """Return qkv (q, k and v side by side), z, b and a; each is `[B, 1, ...]`."""
    if hasattr(module, "in_proj_qkv"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return [getattr(module, name)(x) for name in names]
    if hasattr(module, "in_proj_qkvz"):
        qkvz, ba = module.in_proj_qkvz(x), module.in_proj_ba(x)
        q, k, v, *others = module.fix_query_key_value_ordering(qkvz, ba)
    else:
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        q, k, v, *others = [getattr(module, name)(x) for name in names]
    return torch.cat([part.flatten(2) for part in (q, k, v)], -1), *others
