"""RMSNorm that multiplies by 1 + weight, in torch."""

import torch


def npu_gemma_rms_norm(x, weight, eps):
    """Return the result in x's dtype, and the reciprocal RMS."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1 + weight.float())).to(x.dtype), scale
