"""Shared by gdn_gate and gated_delta_rule_update: computes softplus of any beta and threshold."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# For x from 17 on, softplus(x) equals x in fp32, with or without a threshold.
_STRAIGHT = 17.0


def rate_of(A_log, x, beta: float, threshold: float):
    """Return root, slope and plus: `exp(A_log) softplus(x)` is `root * plus * root`.

    The derivative by x is `root * slope * root`. softplus is x if `beta x` is above the threshold,
    else `log(1 + exp(beta x)) / beta`. exp(A_log) or softplus may overflow or underflow even if
    their product does not. So for `beta x` below -40, where softplus is `exp(beta x) / beta` even
    in fp64, root includes `exp(beta x + 40)`, and plus only the rest. For `beta x` above 40,
    softplus is x: exp could overflow.
    """
    bent = beta * x
    far = bent < -40
    root = torch.exp(0.5 * (A_log + torch.where(far, bent + 40, 0)))
    near = torch.where(far, -40, bent)
    slope = torch.where(bent > threshold, 1, near.sigmoid())
    return root, slope, F.softplus(near, 1.0, min(threshold, 40.0)) / beta


def check_softplus(beta: float, threshold: float) -> tuple[float, float]:
    """Check a softplus's beta and threshold, and return both as floats.

    Raises:
        ValueError: beta is not above 0 and finite, or the threshold is below 0 or a NaN.
    """
    if not isinstance(beta, (int, float)) or not 0 < beta < float("inf"):
        raise ValueError(f"softplus_beta: got {beta!r}, needs a number above 0")
    if not isinstance(threshold, (int, float)) or not threshold >= 0:
        raise ValueError(f"softplus_threshold: got {threshold!r}, needs 0 or more")
    return float(beta), float(threshold)


def is_plain(beta: float, threshold: float) -> bool:
    """Return whether this softplus equals log(1 + exp(x)) in fp32."""
    return beta == 1 and threshold >= _STRAIGHT


def plain_alone(arguments) -> str | None:
    """Return why an implementation without beta and threshold does not support a call, or None."""
    beta, threshold = arguments.softplus_beta, arguments.softplus_threshold
    if is_plain(beta, threshold):
        return None
    return f"softplus has beta {beta}, threshold {threshold}, the kernel computes log(1 + exp(x))"
