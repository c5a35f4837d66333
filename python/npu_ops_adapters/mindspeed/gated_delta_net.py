"""Replaces the operators that MindSpeed's layers of Gated Delta Net import or select.

core_r0.16 has its own layer (for context parallelism and packed sequences), which imports operators
by value. core_r0.18 has a subclass of Megatron's layer, whose module imports two operators under
other names; later versions load operators when the layer is built. MindSpeed also sets operators
under fla's names. Megatron's layer imports these, and the Megatron adapter replaces them there.

MindSpeed-Bridge has another layer, for Qwen3.5 on core_r0.16. Its configuration selects MindSpeed's
kernels, fla_npu's kernels, or PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable

from npu_ops.core import env
from npu_ops_adapters.megatron import (
    causal_conv1d,
    chunk_gated_delta_rule,
    gdn_gate,
    l2norm,
    rms_norm_gated,
)
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_LAYER = "mindspeed.core.ssm.gated_delta_net"
_BRIDGES_LAYER = "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.gated_delta_net"
_WHY = "MindSpeed's kernels take only bf16, move more memory and wait for lengths on the host"
# Names of operators in a layer's module, where they may have the prefix _ms_. Each name is also the
# op's name in npu-ops.
_OPERATORS = {
    "causal_conv1d": (causal_conv1d.replace, causal_conv1d.SIGNATURES),
    "chunk_gated_delta_rule": (chunk_gated_delta_rule.replace, chunk_gated_delta_rule.SIGNATURES),
    "l2norm": (l2norm.replace, l2norm.SIGNATURES),
}
_IN_TORCH = (
    *("query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state"),
    *("use_qk_l2norm_in_kernel", "cu_seqlens"),
)
_METHODS = {
    "_apply_gated_norm": ("rms_norm_gated", rms_norm_gated.replace, rms_norm_gated.PARAMETERS),
    "_compute_g_and_beta": ("gdn_gate", gdn_gate.replace, gdn_gate.PARAMETERS),
}


def patches() -> Iterable[Patch]:
    """Patch the loader of operators, and the names that the layers' modules import and define."""
    yield _patch(
        "mindspeed.core.ssm.gdn_backend:load_gdn_operators", "gated_delta_net", _load, ((),)
    )
    for layer in (_LAYER, _BRIDGES_LAYER):
        yield from _of_layer(layer)
    yield _patch(
        f"{_BRIDGES_LAYER}:torch_chunk_gated_delta_rule",
        "chunk_gated_delta_rule",
        _replace_in_torch,
        (_IN_TORCH,),
        rebind=False,
    )


def _of_layer(name: str) -> Iterable[Patch]:
    module = vars(sys.modules.get(name, sys))
    for operator, (make, signatures) in _OPERATORS.items():
        for held in {operator, f"_ms_{operator}"} & module.keys():
            # Do not rebind in MindSpeed's own modules: it sets fla's names again from them.
            yield _patch(f"{name}:{held}", operator, make, signatures, rebind=False)
    layer = module.get("GatedDeltaNet")
    for method, (op, make, parameters) in _METHODS.items():
        if layer is None or method in vars(layer):  # otherwise Megatron defines it
            signatures = (("self", *parameters),)
            yield _patch(f"{name}:GatedDeltaNet.{method}", op, make, signatures)


def _patch(target: str, op: str, make: Callable, signatures, **changes) -> Patch:
    return Patch(
        target=target,
        op=op,
        make=make,
        why=_WHY,
        signatures=signatures,
        versions=VERSIONS,
        remove_when="MindSpeed's kernels support the same calls as npu-ops' kernels, as fast",
        **changes,
    )


def _replace_in_torch(original: Callable) -> Callable:
    """Replace MindSpeed-Bridge's PyTorch function.

    By default it normalizes q and k, unlike MindSpeed's and fla_npu's kernels.
    """
    ours = chunk_gated_delta_rule.replace(original)

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_chunk(query, key, value, g, beta, *more, **options):
        if more:
            return original(query, key, value, g, beta, *more, **options)
        return ours(query, key, value, g, beta, **{"use_qk_l2norm_in_kernel": True} | options)

    return npu_ops_chunk


def _load(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_load():
        theirs = original()
        disabled = env.settings.disable
        ours = {
            name: make(getattr(theirs, name))
            for name, (make, _) in _OPERATORS.items()
            if name not in disabled
        }
        return dataclasses.replace(theirs, **ours)

    return npu_ops_load
