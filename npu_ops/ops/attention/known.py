"""Calls of q, k and v alone like one before: they are not checked and not prepared anew.

As core/known.py, for a function that sees its tensors in another order of axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from npu_ops.core.alike import Latest
from npu_ops.core.known import key_of
from npu_ops.core.memo import Bounded
from npu_ops.ops.attention import op
from npu_ops.ops.attention.arguments import normal


@dataclasses.dataclass
class _Known:
    """What is kept of a call.

    rest: the operator's inputs behind q, k and v. watched: by whom. run: what computes it by a plan
        of the operator, once that was asked for; where there is none, as for operators of the
        vendor, or one in C++, which the operator finds itself, the operator.
    """

    rest: tuple
    watched: str | None
    run: Callable | None = None

    def __call__(self, q, k, v, layout: str):
        """out and lse."""
        inputs = normal(q, layout), normal(k, layout), normal(v, layout), *self.rest
        if self.run is not None:
            return self.run(*inputs)
        outputs, plan = op.forward(*inputs), op.forward.plan_of(inputs)
        in_python = plan is not None and not plan.in_cpp
        self.run = op.forward.again(plan, self.watched) if in_python else op.forward
        return outputs


_calls: dict[tuple, _Known] = Bounded(256)
_latest = Latest()


def again(q, k, v, layout: str, settings: tuple):
    """What the call is known by, and out and lse of a call like one before.

    Either is None where there is none: not known yet, or to be looked at each time.

    settings: all arguments that are neither tensors nor the layout.
    """
    around = layout, *settings
    known = _latest.find((q, k, v), around)
    if known is not None:
        return None, known(q, k, v, layout)
    key = key_of((q, k, v), around)
    if key is None or q is None or torch.is_autocast_enabled(q.device.type):
        return None, None
    known = _calls.get(key)
    if known is None:
        return key, None
    _latest.keep((q, k, v), around, known)
    return key, known(q, k, v, layout)


def keep(key: tuple | None, rest: tuple) -> None:
    """Remember a call that was checked."""
    if key is not None:
        watched, _ = key
        _calls[key] = _Known(rest, watched)
