"""l2norm against transformers' function, of queries in one projection with the rest."""

from npu_ops_tools.bench import Sweep
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

SWEEPS = [
    Sweep(
        "l2norm",
        peers={"transformers": lambda: l2norm},
        compiled="transformers",
    )
]
