"""Benchmarks: time the same work with npu-ops and with its peers in one run, and store rows.

benchmarks/bench_<op>.py defines what is timed, as a list `SWEEPS`. `npu-ops bench`, which times all
providers alternately, and `pytest benchmarks/` both read it. npu-ops' results are first compared
with the reference. Wrong results are not timed.
"""

from npu_ops_tools.bench.peers import Absent
from npu_ops_tools.bench.sweep import Benchmark, Sweep, discover, load

__all__ = ["Absent", "Benchmark", "Sweep", "discover", "load"]
