"""Compare linear with torch's function."""

import torch
from npu_ops_tools.bench import Sweep

SWEEPS = [Sweep("linear", peers={"eager": lambda: torch.nn.functional.linear})]
