"""Compare causal_conv1d with the PyTorch code of transformers' Qwen3-Next layer."""

import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS


def transformers(x, weight, activation):
    channels, width = weight.shape
    z = F.conv1d(x.mT, weight[:, None], padding=width - 1, groups=channels)
    return F.silu(z[..., : x.shape[1]]).mT


SWEEPS = [
    Sweep(
        "causal_conv1d",
        peers={
            "transformers": lambda: transformers,
            "causal-conv1d": ON_GPUS,
            "fla": ON_GPUS,
        },
        compiled="transformers",
    )
]
