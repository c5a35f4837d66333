"""The norm that MindSpeed builds instead of Megatron's."""

import torch


class RMSNorm(torch.nn.Module):
    def __init__(self, dim, eps=1e-6, sequence_parallel=False, config=None):
        super().__init__()
        self.eps, self.config = eps, config
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        weight = 1 + self.weight if self.config.layernorm_zero_centered_gamma else self.weight
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)
