"""Shared by gdn_gate and gated_delta_rule_update: a softplus of any beta and threshold."""

from __future__ import annotations

import torch.nn.functional as F

# From this argument on softplus is its argument in fp32, with or without a threshold.
_STRAIGHT = 17.0


def softplus(x, beta: float, threshold: float):
    """x where `beta x` is above the threshold, else `log(1 + exp(beta x)) / beta`.

    torch's, which overflows where the threshold lets it; from 40 on both are one number in fp64.
    """
    return F.softplus(x, beta, min(threshold, 40.0))


def check_softplus(beta: float, threshold: float) -> tuple[float, float]:
    """Both as floats.

    Raises:
        ValueError: beta is not above 0 and finite, or the threshold is below 0 or a NaN.
    """
    if not 0 < beta < float("inf"):
        raise ValueError(f"softplus_beta: got {beta!r}, needs a number above 0")
    if not threshold >= 0:
        raise ValueError(f"softplus_threshold: got {threshold!r}, needs 0 or more")
    return float(beta), float(threshold)


def is_plain(beta: float, threshold: float) -> bool:
    """Whether such a softplus is log(1 + exp(x)) in fp32."""
    return beta == 1 and threshold >= _STRAIGHT


def plain_alone(arguments) -> str | None:
    """What an implementation without beta and threshold has against a call."""
    beta, threshold = arguments.softplus_beta, arguments.softplus_threshold
    return None if is_plain(beta, threshold) else f"softplus has beta {beta}, threshold {threshold}"
