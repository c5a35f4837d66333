"""Calls of q, k and v alone that were checked before: what is known of them is kept.

Checks and forms are most of what a short call costs the host.
"""

from __future__ import annotations

import torch

from npu_ops.core.memo import Bounded
from npu_ops.ops.attention.arguments import Extra, Rule, normal

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_rules: dict[tuple, Rule] = Bounded(256)


def key_of(q, k, v, settings: tuple) -> tuple | None:
    """What a call is known by; None where it has to be looked at each time.

    settings: all arguments that are not tensors, the layout first.
    """
    plain = type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
    if not plain or q.is_meta or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(q.device.type):
        return None
    key = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return (*key, *settings)


def prepared(key: tuple | None, q, k, v, layout: str):
    """q, k, v, extra and rule as implementations take them, of a call like one before; or None."""
    try:
        rule = _rules.get(key) if key else None
    except TypeError:  # what cannot be a key is no setting either
        return None
    if rule is None:
        return None
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    rule = rule._replace(training=wanted and torch.is_grad_enabled())
    return normal(q, layout), normal(k, layout), normal(v, layout), Extra(), rule


def keep(key: tuple | None, rule: Rule) -> None:
    """Keep the rule of a call that was checked."""
    if key is not None:
        _rules[key] = rule
