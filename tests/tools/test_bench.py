"""A benchmark times what is right, and says how."""

import csv

import pytest
import torch
from npu_ops_tools import bench
from npu_ops_tools.bench import Benchmark

X = torch.ones(64, 64)


def benchmark(ours, **changes):
    settings = {
        "op": "double", "case": "ones", "mode": "forward", "dtype": torch.float32,
        "shape": {"x": [64, 64]}, "baseline": "eager", "moved": 2 * X.nbytes,
        "expected": lambda: (2 * X,), "tolerance": 1e-6,
    }  # fmt: skip
    providers = {"npu_ops": ours, "eager": lambda: (X + X,)}
    return Benchmark(providers=providers, **(settings | changes))


def test_what_is_wrong_is_not_timed():
    calls = []
    wrong = benchmark(lambda: calls.append(1) or (3 * X,))
    with pytest.raises(AssertionError, match="double ones forward: error ratio 5.00e-01"):
        bench.measure(wrong, "cpu", seconds=0.01)
    assert len(calls) == 1


def test_a_nan_is_wrong():
    with pytest.raises(AssertionError, match="error ratio nan"):
        bench.check(benchmark(lambda: (X * float("nan"),)))


def test_rows(tmp_path):
    rows = bench.measure(benchmark(lambda: (2 * X,)), "cpu", seconds=0.05)
    ours, eager = rows
    assert (ours["impl"], eager["impl"], eager["speedup"]) == ("npu_ops", "eager", "1.000")
    assert float(ours["ms_p20"]) <= float(ours["ms_p50"]) <= float(ours["ms_p80"])
    assert ours["err_ratio"] == "0.00e+00" and eager["err_ratio"] == ""
    assert ours["device"] == "cpu" and ours["repro"].startswith("npu-ops")
    path = bench.write(rows, tmp_path / "new")
    assert path.name == "cpu.csv"
    assert list(csv.DictReader(path.open()))[0]["op"] == "double"


def test_a_long_benchmark_ends_after_a_few_turns(monkeypatch):
    monkeypatch.setattr(bench, "LONGEST", 0.0)
    monkeypatch.setattr(bench, "_repeats", lambda run, device: 1)
    calls = []
    bench.measure(benchmark(lambda: calls.append(1) or (2 * X,)), "cpu", seconds=60, turns=1000)
    assert len(calls) == 1 + 2 + bench.FEWEST  # checked, its memory measured, timed


def test_memory_beyond_the_inputs_is_seen():
    peak = bench.peak_mb(lambda: torch.ones(64, 2**18))
    assert 64 <= peak < 80
    assert bench.peak_mb(lambda: None) < 2


def test_an_op_without_a_benchmark():
    with pytest.raises(ValueError, match="ops: got .'nope'., needs some of"):
        bench.discover(["nope"])
