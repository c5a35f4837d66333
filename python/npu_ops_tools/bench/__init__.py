"""Benchmarks: time npu-ops and other implementations of a function, and store rows.

The other implementations are called peers; npu-ops and its peers are the providers. The list
`SWEEPS` in benchmarks/bench_<op>.py defines the benchmarks. `npu-ops bench`, which times all
providers alternately, and `pytest benchmarks/` read it. npu-ops' results are first compared with
the reference. Wrong results are not timed.
"""

from npu_ops_tools.bench.peers import Absent
from npu_ops_tools.bench.sweep import Benchmark, Sweep, discover, load

__all__ = ["Absent", "Benchmark", "Sweep", "discover", "load"]
