"""Calls of q, k and v alone like one before: they are not checked and not prepared anew.

As core/known.py, for a function that sees its tensors in another order of axes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from npu_ops.core import library, plans
from npu_ops.core.memo import Bounded
from npu_ops.ops.attention import op
from npu_ops.ops.attention.arguments import normal


@dataclasses.dataclass
class _Known:
    """What is kept of a call.

    rest: the operator's inputs behind q, k and v. plan: of the operator; None before it was asked
        for, False where there is none, as for operators of the vendor.
    """

    rest: tuple
    plan: plans.Plan | Literal[False] | None = None


_calls: dict[tuple, _Known] = Bounded(256)


def again(q, k, v, layout: str, settings: tuple):
    """What the call is known by, and out and lse of a call like one before.

    Either is None where there is none: not known yet, or to be looked at each time.

    settings: all arguments that are neither tensors nor the layout.
    """
    watched = library.watched((q, k, v))
    if watched is library.BY_MORE or q is None or torch.is_autocast_enabled(q.device.type):
        return None, None
    try:
        key = plans.key_of((q, k, v), (watched, layout, *settings))
        known = _calls.get(key)
    except (TypeError, RuntimeError):
        # What is no key is no setting either, and a sparse or nested tensor has no strides.
        return None, None
    if known is None:
        return key, None
    inputs = normal(q, layout), normal(k, layout), normal(v, layout), *known.rest
    return key, _computed(known, inputs, watched)


def keep(key: tuple | None, rest: tuple) -> None:
    """Remember a call that was checked."""
    if key is not None:
        _calls[key] = _Known(rest)


def _computed(known: _Known, inputs: tuple, watched: str | None):
    if known.plan:
        run = op.forward.run_again if watched is None else op.forward.record_again
        return run(inputs, known.plan)
    outputs = op.forward(*inputs)
    if known.plan is None:
        known.plan = op.forward.plan_of(inputs) or False
    return outputs
