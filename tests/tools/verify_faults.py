"""Makes an implementation of l2norm that calls the correct one and then does something wrong."""

from npu_ops_tools.verify import jobs

# The width of a row decides which fault occurs.
_TEXT = """
import ctypes, dataclasses, itertools, os, time
import torch
from npu_ops.core.registry import Table
import npu_ops

BY, FAULTS = {by!r}, {faults!r}
table, calls = Table.tables["l2norm"], itertools.count()
one = next(i for i in table.implementations if i.name == BY)


def launcher(x, eps, out):
    one.launcher(x, eps, out)
    exec(FAULTS.get(x.shape[-1], ""), globals(), locals())


table.implementations = tuple(
    dataclasses.replace(i, load=lambda: launcher) if i.name == BY else i
    for i in table.implementations
)
"""


def faulty(by: str, faults: dict[int, str]) -> str:
    """Return the source of a module for `verify --import` that makes an implementation faulty.

    by: the implementation's name. faults: code to run after each call, by width of the rows.
    """
    return _TEXT.format(by=by, faults=faults)


def job(case: str, implementation: str = "cpu", op: str = "l2norm") -> jobs.Job:
    return jobs.Job("check", op, implementation, case, "bfloat16")


def width(case: str) -> int:
    return job(case).find().dim


def ranks(verdict: str) -> dict:
    """Return verify's result for two ranks, without running any."""
    return {"kind": "ranks", "name": "two ranks", "verdict": verdict, "why": "", "seconds": 0}
