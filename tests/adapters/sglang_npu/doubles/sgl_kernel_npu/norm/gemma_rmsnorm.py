"""RMSNorm whose weights are beside 1, in torch."""

import torch


def npu_gemma_rms_norm(x, weight, eps):
    """The result in x's dtype, and what it was multiplied with."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1 + weight.float())).to(x.dtype), scale
