"""Benchmarks time only correct results, give intervals, and keep one row per key."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from made_rows import absent, row
from npu_ops_tools import where
from npu_ops_tools.bench import Absent, Sweep, discover, load, peers, rows, run, timing, work
from npu_ops_tools.bench.compare import compare, slower
from npu_ops_tools.bench.timing import Times
from npu_ops_tools.cli import app
from typer.testing import CliRunner

from npu_ops.ops import l2norm


def eager(x, eps):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def missing():
    raise Absent("not here")


SWEEP = Sweep("l2norm", {"eager": lambda: eager, "other": missing}, sizes=(1, 4, 8))


@pytest.fixture(autouse=True)
def no_clutter(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_RUNS", 7)
    work._kept.clear()


def first(sweep=SWEEP, mode="forward"):
    return next(b for b in sweep.benchmarks(quick=True) if b.mode == mode)


def test_what_is_wrong_is_not_timed(monkeypatch):
    def wrong(x, eps):
        return l2norm.l2norm(x, eps) * (1 if x.dtype == torch.float64 else 1.01)

    monkeypatch.setattr(work.cases, "function", lambda op, case: wrong)
    monkeypatch.setattr(work, "_takers", lambda *args: {work.OURS: "cpu"})
    with pytest.raises(AssertionError, match="l2norm: .* 4 tokens, forward.* error ratio .*needs"):
        list(run.measure(first(), "cpu", longest=0.0))


def test_a_backward_alone_is_of_a_later_call():
    made = []

    def counted(x, eps):
        made.append(eager(x, eps))
        return made[-1]

    sweep = dataclasses.replace(SWEEP, peers={"counted": lambda: counted})
    call = work.Work(first(sweep, "backward"), "cpu").calls["counted"]
    for _ in range(3):
        call()
    assert len(made) == work._STEPS_BEFORE + 1


def test_all_modes_of_what_draws_drop_the_same():
    """The gradients kept for the next mode must use the same dropout mask."""
    (sweep,) = (x for x in load(discover()["bias_dropout_add"]) if x.random)
    for benchmark in sweep.benchmarks(quick=True):
        work.Work(benchmark, "cpu").errors()


def test_a_nan_is_wrong():
    made = work.Work(first(), "cpu")
    with pytest.raises(AssertionError, match="error ratio nan"):
        made._judge(work.OURS, [torch.ones(1)], [float("nan")])


@pytest.mark.parametrize("mode", ["forward", "backward", "forward+backward"])
def test_rows_of_each_mode(mode):
    ours, peer = run.measure(first(mode=mode), "cpu", longest=0.0)
    assert (ours.provider, ours.implementation, peer.provider) == ("npu-ops", "cpu", "eager")
    assert ours.ms_p20 <= ours.ms_p50 <= ours.ms_p80
    assert ours.ms_low <= ours.ms_p50 <= ours.ms_high and ours.runs == timing.LEAST_RUNS
    assert ours.error < 2e-3 and peer.error < 1e-2 and ours.error_against == "reference in fp64"
    one = 4 * 16 * 128 * 2  # bytes of x
    assert ours.bytes == peer.bytes == {"forward": 2, "backward": 3}.get(mode, 5) * one
    assert ours.copy_gbps > 0 and ours.flop is None and ours.matmul_tflops is None


def test_a_command_repeats_its_row():
    benchmark = first()
    made = next(run.measure(benchmark, "cpu", longest=0.0))
    assert made.command == f"npu-ops bench l2norm --only '{benchmark.name}'"


def test_what_is_absent_is_named():
    (said,) = run.absent(SWEEP, "cpu")
    assert (said.provider, said.state, said.note, said.ms_p50) == (
        "other",
        "absent",
        "not here",
        None,
    )


def test_a_star_has_every_size_dtype_model_and_number_of_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "MEGATRON", tmp_path / "none")  # importing it takes seconds
    for op, path in discover().items():
        for sweep in load(path):
            found = list(sweep.benchmarks())
            assert len({b.name for b in found}) == len(found)
            base = [b for b in found if b.shape == found[0].shape]
            assert len({b.size for b in base}) >= 5, op
            assert len({b.dtype for b in base}) == 3
            ranks = {b.shape.rpartition(" tp")[2] for b in found}
            assert ranks == {"1", "4", "8"}, op


def test_errors_beyond_what_fits_are_against_fp32():
    sweep = dataclasses.replace(SWEEP, exact_to=2, beyond="eager")
    ours, _ = run.measure(first(sweep), "cpu", longest=0.0)
    assert ours.error_against == "eager in fp32" and 0 < ours.error < 2e-3


# Times


def test_the_interval_of_a_median_has_it_95_times_of_100():
    draw = torch.Generator().manual_seed(0)
    for count in (7, 12, 40):
        samples = torch.rand((2000, count), generator=draw).exp().tolist()
        median = torch.tensor(0.5).exp().item()
        inside = [low <= median <= high for low, high in (Times(1, s).interval() for s in samples)]
        assert 0.945 <= sum(inside) / len(inside) <= 0.995


def test_stable_is_within_five_percent():
    assert Times(1, [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01]).stable()
    assert not Times(1, [1.0, 1.01, 0.99, 1.02, 0.9, 1.0, 1.01]).stable()
    assert Times(1, [1.0] * 20 + [9.0] * 3).stable()
    assert not Times(1, [1.0] * 6).stable()


def test_times_are_taken_in_turns_until_all_are_known(monkeypatch):
    clock, calls = itertools.count(), []
    monkeypatch.setattr(timing, "seconds", lambda call, n, device: 1 + call() * (next(clock) % 2))
    found = timing.interleaved(
        {"a": lambda: calls.append("a") or 0, "b": lambda: calls.append("b") or 0}, "cpu", 60.0
    )
    turns = calls[6:]  # three calls each came first, to estimate the time
    assert [set(pair) for pair in zip(turns[::2], turns[1::2], strict=True)] == [{"a", "b"}] * 7
    assert turns[:4] == ["b", "a", "a", "b"] and len(found["a"].seconds) == timing.LEAST_RUNS


def test_what_does_not_settle_ends(monkeypatch):
    slower = itertools.count(1)
    monkeypatch.setattr(timing, "seconds", lambda call, n, device: next(slower) ** 2)
    found = timing.interleaved({"a": lambda: None}, "cpu", longest=0.02)
    assert not found["a"].stable() and len(found["a"].seconds) > timing.LEAST_RUNS


# In 10^6 bytes. Linux counts pages per processor in batches and does not show unfinished batches:
# VmRSS "is inaccurate", says proc_pid_status(5). A batch has 32 pages, or two per processor if that
# is more. The error occurs twice: in the count before and in the count after.
MISCOUNTED = 2 * max(32, 2 * os.cpu_count()) * os.cpu_count() * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_memory_beyond_the_inputs_is_seen():
    taken = max(64, 2 * math.ceil(MISCOUNTED))
    found = timing.peak_mb(lambda: torch.ones(taken, 250_000), "cpu")
    assert -MISCOUNTED <= found - taken < 16
    assert timing.peak_mb(lambda: None, "cpu") < 2


# Rows


def test_rows_are_read_as_they_were_written(tmp_path):
    made = [row(), row(provider="eager", error=None, peak_mb=None, flop=3), absent(note="a, b")]
    (path,) = rows.upsert(made, tmp_path)
    assert path == tmp_path / "cpu" / "l2norm.csv"
    assert rows.read(path) == rows.read(tmp_path) == made


def test_a_row_replaces_the_one_with_its_key(tmp_path):
    rows.upsert([row(), row(size=1)], tmp_path)
    rows.upsert([row(ms=1.0), row(device="cuda"), row(machine="Another")], tmp_path)
    cpu = rows.read(tmp_path / "cpu" / "l2norm.csv")
    assert [(r.size, r.machine, r.ms_p50) for r in cpu] == [
        (128, "A Processor", 1.0), (1, "A Processor", 2.0), (128, "Another", 2.0),
    ]  # fmt: skip
    assert len(rows.read(tmp_path / "cuda" / "l2norm.csv")) == 1


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other.csv: got no column .* needs a bench CSV"):
        rows.read(tmp_path / "other.csv")
    with pytest.raises(FileNotFoundError, match="no.csv"):
        rows.read(tmp_path / "no.csv")


# Comparing


def test_changes_are_ratios_with_intervals():
    old = [row(), row(size=1), row(provider="eager"), absent()]
    new = [row(ms=2.5), row(size=1, ms=1.9), row(provider="eager", ms=9.0), row(size=16)]
    worst, better = compare(old, new)
    assert worst.ratio == 1.25 and worst.low == pytest.approx(2.45 / 2.04)
    assert worst.high == pytest.approx(2.55 / 1.96) and better.ratio == 0.95
    assert slower([worst, better], 0.05) == [worst] and slower([worst], 0.25) == []


def test_machines_are_not_compared_with_each_other():
    with pytest.raises(ValueError, match="got results without a common benchmark"):
        compare([row()], [row(machine="Another")])


# The command line


def bench(*arguments, code=0):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout if code != 2 else done.stderr


def test_compare_ends_with_1_beyond_the_threshold(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    rows.upsert([row()], old)
    rows.upsert([row(ms=2.4)], new)
    said = bench("--compare", old, new, code=1)
    assert (
        "1.200 (1.153 to 1.249)" in said
        and ("1 of 1 significantly slower, by more than 5%") in said
    )
    bench("--compare", old, new, "--threshold", 0.2)
    assert "no such file" in bench("--compare", old, tmp_path / "none", code=2)


def test_results_of_changes_are_not_committed(monkeypatch):
    monkeypatch.setattr(rows, "commit", lambda: ("0123", True))
    assert "got uncommitted changes" in bench("l2norm", "--commit", code=2)


def test_only_what_is_named_is_timed(tmp_path):
    said = bench("l2norm", "--quick", "--longest", 0, "--json", "--only", ", forward, ",
                 "--only", " 16 tokens")  # fmt: skip
    made = json.loads(said)
    assert {(r["size"], r["mode"]) for r in made} == {(16, "forward")}
    assert {r["provider"] for r in made} == {"npu-ops", "transformers"}
    wrong = bench("l2norm", "--quick", "--only", "nope", code=2)
    assert "only: got ['nope'], which is in no benchmark's name" in wrong


def test_pytest_runs_the_same_definitions(tmp_path):
    # Without xdist's variables: in an xdist worker pytest-benchmark times nothing.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "ignore", where.ROOT / "benchmarks",
         "--op", "l2norm", "-k", "16-tokens-forward-bfloat16", "-p", "no:cacheprovider",
         "--benchmark-json", tmp_path / "out.json", "--benchmark-max-time", "0.02"],
        capture_output=True, text=True, cwd=where.ROOT, env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert {b["param"] for b in made} == {"npu-ops", "transformers"}
    assert len({b["group"] for b in made}) == 1


def test_an_op_without_a_benchmark():
    with pytest.raises(ValueError, match="nope"):
        discover(["nope"])


def test_torch_compiles_every_size(monkeypatch):
    """By default torch.compile gives up after 8 recompilations, and the rows would be eager's."""
    import torch._dynamo.config as dynamo

    monkeypatch.setattr(dynamo, "recompile_limit", 8)
    made = []
    monkeypatch.setattr(torch, "compile", lambda f: made.append(dynamo.recompile_limit) or f)
    (first, *_) = dataclasses.replace(SWEEP, compiled="eager").benchmarks()
    assert "torch.compile" in first.peers and made[0] > 3 * 6 * 3  # sizes, dtypes and modes
