"""Scale experts' weights to a sum of 1, in torch."""


def l1_norm(x):
    """Divide by the sum of the last dimension, in fp32."""
    wide = x.float()
    return wide / wide.sum(-1, keepdim=True)
