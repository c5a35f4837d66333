"""Compare gdn_gate with the two lines of transformers' Qwen3NextGatedDeltaNet."""

import torch.nn.functional as F
from npu_ops_tools.bench import Sweep


def transformers(a, A_log, dt_bias, b, **settings):
    beta = b.sigmoid()
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias), beta


SWEEPS = [
    Sweep(
        "gdn_gate",
        peers={"transformers": lambda: transformers},
        compiled="transformers",
    )
]
