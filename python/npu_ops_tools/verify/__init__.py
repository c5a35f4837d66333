"""Whether npu-ops is right and fast on this machine, in a form that can be sent to others.

    jobs.py     what there is to check: ops, implementations, cases, dtypes
    runs.py     goes through it within a time, keeps a journal, makes the report
    worker.py   a process that checks, and what becomes of one that hangs or crashes
    checks.py   one call: values, bounds, determinism, streams, graphs
    guards.py   canaries around every tensor of a launch
    times.py    how long a call takes, on the device and on the host
    ranks.py    two devices: collectives, the same results on both
    report.py   one JSON file and one page, without names of hosts or users
    compare.py  two reports

The command: `npu-ops verify --help`.
"""

from __future__ import annotations

from npu_ops_tools.verify.runs import Options, run

__all__ = ["Options", "run"]
