"""With NPU_OPS_CONSISTENT, Megatron routes tokens and computes experts as transformers does.

The router's logits do not depend on the number of tokens. A routing weight is a softmax over all
experts, divided by the sum over the chosen ones. Each expert's result is rounded, multiplied by its
routing weight, rounded, and added in order of expert id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from npu_ops.consistent.experts import order_of
from npu_ops.core import env, make
from npu_ops_adapters.patching import Names, Patch

_HOME = "megatron.core.transformer.moe"
_ROUTING = (
    "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor",
    "score_function", "expert_bias", "fused",
)  # fmt: skip
_ALSO = "router_replay", "dense_output", "precomputed_indices"  # from 0.16, 0.18 and 0.19 on
_UNPERMUTE = (
    "permuted_tokens", "sorted_indices", "restore_shape", "probs", "routing_map", "fused",
    "drop_and_pad",
)  # fmt: skip
PARAMETERS = "self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"


def patches() -> Iterable[Patch]:
    """Yield the patches, or nothing without NPU_OPS_CONSISTENT."""
    if not env.settings.consistent:
        return
    yield _patch(
        "moe_utils:router_gating_linear", _gate, "its bits depend on the number of tokens",
        ("inp", "weight", "router_dtype"), ("inp", "weight", "bias", "router_dtype"),
    )  # fmt: skip
    yield _patch(
        "moe_utils:topk_routing_with_score_function", _choose,
        "its softmax covers only the chosen experts",
        *(_ROUTING + _ALSO[:known] for known in range(4)),
    )  # fmt: skip
    yield unpermute()
    for kind in ("SequentialMLP", "GroupedMLP", "TEGroupedMLP"):
        why = "it multiplies by the weights before the second product"
        yield _patch(f"experts:{kind}.forward", computed, why, PARAMETERS, optional=True)


def unpermute() -> Patch:
    """Patch the function that adds each token's expert results. MindSpeed replaces it, too."""
    return _patch(
        "moe_utils:unpermute", _add, "it rounds the sum after each expert",
        _UNPERMUTE, (*_UNPERMUTE, "pad_offsets"),
    )  # fmt: skip


def _patch(target: str, replace: Callable, why: str, *signatures: Names, **changes) -> Patch:
    return Patch(
        target=f"{_HOME}.{target}", op="grouped_linear", make=replace, why=why,
        signatures=signatures, versions="Megatron-Core 0.14 to 0.19",
        remove_when="Megatron-Core has an option for the roundings of transformers", **changes,
    )  # fmt: skip


def _gate(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_gate(inp, weight, *more):
        *bias, router_dtype = more
        return torch.nn.functional.linear(inp, weight.to(inp.dtype), *bias).to(router_dtype)

    return npu_ops_gate


def _choose(original: Callable) -> Callable:
    """Replace softmax routing; other score functions are not changed.

    With use_pre_softmax Megatron's function returns the softmax over all experts. If the caller did
    not ask for use_pre_softmax, the chosen weights are divided by their sum here.
    """

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_routing(logits, topk, use_pre_softmax=False, *more, **named):
        given = dict(zip(_ROUTING[3:], more, strict=False)) | named
        if given.get("score_function", "softmax") != "softmax":
            return original(logits, topk, use_pre_softmax, **given)
        weights, chosen = original(logits.float(), topk, True, **given)
        if not use_pre_softmax:
            weights = weights / weights.topk(topk, -1).values.sum(-1, keepdim=True)
        return weights.to(logits.dtype), chosen

    return npu_ops_routing


def _add(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_unpermute(permuted_tokens, sorted_indices, restore_shape, *more, **named):
        given = dict(zip(_UNPERMUTE[3:], more, strict=False)) | named
        tokens = restore_shape[0]
        for name in ("probs", "fused", "drop_and_pad"):
            if given.get(name) is not None and given[name] is not False:
                raise ValueError(
                    f"{name}: got a value, needs None or False with NPU_OPS_CONSISTENT"
                )
        # Rows that divide evenly may still be unequal per token; the result is then NaN, see below.
        if len(permuted_tokens) % max(tokens, 1):
            raise ValueError(
                f"permuted_tokens: got {len(permuted_tokens)} rows for {tokens} tokens, needs the"
                " same number for each token with NPU_OPS_CONSISTENT: set"
                " --moe-token-dispatcher-type alltoall"
            )
        if not permuted_tokens.numel():
            return permuted_tokens.new_zeros(restore_shape)
        place = order_of(sorted_indices).view(tokens, -1)
        own = make.counted(tokens, device=place.device)[:, None]
        # True if tokens have different numbers of rows
        other = (sorted_indices[place] != own).any()
        return permuted_tokens[place].sum(1).masked_fill(other, torch.nan)

    return npu_ops_unpermute


def computed(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        alone = torch.ones_like(permuted_probs)
        out, bias = original(self, permuted_local_hidden_states, tokens_per_expert, alone)
        return out * permuted_probs.to(out.dtype)[:, None], bias

    return forward
