"""Compare l2norm with transformers' function, on queries that are a slice of one projection."""

from npu_ops_tools.bench import Sweep
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

SWEEPS = [
    Sweep(
        "l2norm",
        peers={"transformers": lambda: l2norm},
        compiled="transformers",
    )
]
