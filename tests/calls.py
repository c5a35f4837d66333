"""The sample calls that every op's `cases.py` lists, for tests that run on all of them."""

from __future__ import annotations

from npu_ops_tools.where import ops

from npu_ops.core import cases
from npu_ops.core.cases import Call

CALLS = {str(call): call for op in ops() for call in cases.of(op).CALLS}
IN_PLACE = {name: call for name, call in CALLS.items() if call.writes}


def differentiable(call: Call) -> list[str]:
    """Return the names of the call's tensors that can have a gradient."""
    (op,) = (op for op in ops() if call in cases.of(op).CALLS)
    wanted = cases.of(op).DIFFERENTIABLE if call.differentiable is None else call.differentiable
    return [name for name in call.tensors() if name in wanted]


def floats(call: Call) -> list[str]:
    """Return the names of the call's floating-point tensors."""
    arguments = call.arguments()
    return [name for name in call.tensors() if arguments[name].is_floating_point()]
