"""Select the benchmarks of `pytest benchmarks/`: two sizes of one model, or all with --all."""

import pytest
import torch
from npu_ops_tools.bench import discover, load
from npu_ops_tools.bench.work import OURS, Work


def pytest_addoption(parser):
    group = parser.getgroup("npu-ops")
    group.addoption("--all", action="store_true", help="every size, dtype, model and rank")
    group.addoption("--op", action="append", help="an op; may be repeated; default: all")
    group.addoption("--device", default="cpu", help="a torch device")


def pytest_generate_tests(metafunc):
    """Make a test for each provider of each benchmark. Inputs are computed only when it runs."""
    if "provider" not in metafunc.fixturenames:
        return
    quick = not metafunc.config.getoption("--all")
    found = [
        (benchmark, provider)
        for path in discover(metafunc.config.getoption("--op")).values()
        for sweep in load(path)
        for benchmark in sweep.benchmarks(quick)
        for provider in (OURS, *benchmark.peers)
    ]
    names = [f"{b.op}, {b.name}, {name}".replace(", ", "-").replace(" ", "-") for b, name in found]
    metafunc.parametrize("work, provider", found, indirect=["work"], ids=names)


_last: dict = {}


@pytest.fixture
def work(request):
    """Return the `Work` of a benchmark. The tests of all its providers use the same object."""
    benchmark, device = request.param, request.config.getoption("--device")
    if _last.get("benchmark") is not benchmark:
        _last.clear()
        torch.manual_seed(0)
        made = Work(benchmark, device)
        made.errors()  # raises if a result is wrong, so that it is not timed
        _last.update(benchmark=benchmark, work=made)
    return _last["work"]
