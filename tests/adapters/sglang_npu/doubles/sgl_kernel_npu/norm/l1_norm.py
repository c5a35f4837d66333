"""Weights of experts that sum to 1, in torch."""


def l1_norm(x):
    """In fp32."""
    wide = x.float()
    return wide / wide.sum(-1, keepdim=True)
