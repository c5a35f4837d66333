"""The norm that MindSpeed builds in the place of Megatron's."""

import torch


class RMSNorm(torch.nn.Module):
    def __init__(self, dim, eps=1e-6, sequence_parallel=False, config=None):
        super().__init__()
        self.eps, self.config = eps, config
        self.weight = torch.nn.Parameter(torch.ones(dim))
