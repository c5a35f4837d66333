"""Benchmarks: the same work by npu-ops and by what it replaces, in one run, and rows of it.

What is timed is in benchmarks/bench_<op>.py: a list `SWEEPS`. Both `npu-ops bench`, which times all
providers turn by turn, and `pytest benchmarks/` read it. What is ours is compared with the
reference first; what is wrong is not timed.
"""

from npu_ops_tools.bench.peers import Absent
from npu_ops_tools.bench.sweep import Benchmark, Sweep, discover, load

__all__ = ["Absent", "Benchmark", "Sweep", "discover", "load"]
