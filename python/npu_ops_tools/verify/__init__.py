"""Verifies that npu-ops is right and fast on this machine, and writes a report to share.

    jobs.py     the checks: ops, implementations, cases, dtypes
    runs.py     runs them within a time limit, keeps a journal, makes the report
    worker.py   starts a process for the checks, and restarts it if it hangs or crashes
    child.py    that process
    checks.py   one call: values, bounds, determinism, streams, graphs
    guards.py   canaries around every tensor of a launch
    times.py    times of a call on the device and on the host
    ranks.py    two devices: collectives, the same results on both
    report.py   one JSON file and one page, without names of hosts or users
    compare.py  compares two reports

The command: `npu-ops verify --help`.
"""

from __future__ import annotations

from npu_ops_tools.verify.runs import Options, run

__all__ = ["Options", "run"]
