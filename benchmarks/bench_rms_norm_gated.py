"""Compare rms_norm_gated with transformers' module."""

import types

from npu_ops_tools.bench import Sweep
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated


def transformers(x, weight, z, activation, **settings):
    module = types.SimpleNamespace(weight=weight, variance_epsilon=1e-6, activation=activation)
    return Qwen3NextRMSNormGated.forward(module, x, z)


SWEEPS = [
    Sweep(
        "rms_norm_gated",
        peers={"transformers": lambda: transformers},
        compiled="transformers",
        slack=4.0,  # the gradient of the weight is a sum over all rows
    )
]
