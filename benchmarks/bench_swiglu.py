"""Compare swiglu with torch's functions."""

import torch
from npu_ops_tools.bench import Sweep


def eager(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return torch.nn.functional.silu(gate) * up


SWEEPS = [Sweep("swiglu", peers={"eager": lambda: eager}, compiled="eager")]
