"""Compare bias_dropout_add with Megatron's function, compiled and not."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import megatron


def eager(x, bias, residual, p, training):
    x = x if bias is None else x + bias
    return residual + F.dropout(x, p, training)


def megatrons():
    unfused = megatron("fusions.fused_bias_dropout", "bias_dropout_add_unfused")

    def run(x, bias, residual, p, training):
        return unfused(training)((x, bias), residual, p)

    return run


def with_bias(inputs, p):
    """Add the bias of a linear layer, which Megatron leaves to this op; Qwen's layers have none."""
    x = inputs["x"]
    return inputs | {"bias": torch.linspace(-1, 1, x.shape[-1]).to(x), "p": p}


SWEEPS = [
    Sweep(
        "bias_dropout_add",
        peers={"eager": lambda: eager, "Megatron": megatrons},
        compiled="eager",
        label=f"p={p}",
        prepare=lambda inputs, p=p: with_bias(inputs, p),
        models=models,
        random=p > 0,
        slack=4.0,  # the gradient of the bias is a sum over all rows
    )
    for p, models in ((0.1, ("qwen3-vl-8b", "qwen3-next-80b-a3b")), (0.0, ("qwen3-vl-8b",)))
]
