"""`npu-ops model --calibrate` recovers the constants from which test times were computed."""

import json

import pytest
import torch
from npu_ops_tools import verify
from npu_ops_tools.cli import app
from npu_ops_tools.model import costs
from npu_ops_tools.model.calibration import benchmarks, fit
from npu_ops_tools.verify import child, jobs, report, runs
from typer.testing import CliRunner

pytestmark = pytest.mark.xdist_group("calibration")
SOC = "Ascend910B4-1"
OTHER = {"launch": 1.3, "program": 0.05, "latency": 0.7, "memory": 1.0e6, "restart": 0.3}
# Simulating the group "copy by cores" takes longest; the test uses only these two of it.
QUICK = ("40 cores", "40 cores, beyond the cache")


@pytest.fixture(scope="module")
def said():
    return fit.Predicted(SOC)


def made(times):
    """Return a report of `npu-ops verify` with these microbenchmark times."""
    rows = [{"group": group, "name": name, "us": us} for (group, name), us in times.items()]
    result = {"kind": jobs.MICROBENCHMARKS, "soc": SOC, jobs.MICROBENCHMARKS: rows}
    return {"format": 1, "environment": {}, "results": [result | {"verdict": "right"}]}


def test_the_constants_by_which_times_were_made_are_found(said, tmp_path, monkeypatch):
    """The fitted constants also predict the times of groups that were not fitted."""
    prices = costs.of(SOC).replace(**OTHER)
    chosen = [key for key in said.launches if key[0] != "copy by cores" or key[1] in QUICK]
    assert {key[0] for key in chosen} == {one.group for one in benchmarks.of(20, 40)}
    (tmp_path / "verify.json").write_text(
        json.dumps(made({key: said.of(key, prices) for key in chosen}))
    )
    monkeypatch.setattr(fit, "Predicted", lambda soc: said)
    arguments = ["model", "--calibrate", str(tmp_path / "verify.json"), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["was"] == {name: getattr(costs.of(SOC), name) for name in fit.CONSTANTS}
    for name, value in OTHER.items():
        assert found["now"][name] == pytest.approx(value, rel=0.05), name
    for group, (before, after) in found["off"].items():
        assert after == pytest.approx(1, abs=0.02), group
        assert abs(before - 1) > 0.01
    text = "\n".join(fit.lines(fit.Fit(**found)))
    assert "launch        0.24 ->     1.3" in text and "us, 5.4" in text and "not fitted" in text


def test_few_constants_are_fitted():
    assert len(fit.CONSTANTS) <= 5 and set(fit.CONSTANTS) <= set(costs.FITTED)


def test_reports_without_them_are_refused():
    with pytest.raises(ValueError, match="the report has no microbenchmarks"):
        fit.measured({"results": [{"kind": "ranks"}]})


def test_times_of_other_microbenchmarks_are_refused(said):
    with pytest.raises(ValueError, match="got copy by magic, needs those of this version"):
        fit.fit(SOC, {("copy", "by magic"): 1.0}, said)


# Verdicts of `npu-ops verify`


def test_a_full_run_without_times_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "plan", lambda *args: {})
    ranks = {"kind": "ranks", "name": "two ranks", "verdict": "right", "why": "", "seconds": 0}
    monkeypatch.setattr(runs._Run, "_ranks", lambda self: ranks)
    found = verify.run(verify.Options("cpu", full=True), tmp_path, lambda line: None)
    (last,) = (r for r in found["results"] if r["kind"] == jobs.MICROBENCHMARKS)
    assert last["verdict"] == "declined" and "cpu has no times of an NPU" in last["why"]
    page = report.page(found | {"environment": {"npu_ops": "1", "known bad": []}})
    assert "has no times of an NPU" in page


def test_the_process_that_checks_measures_them(monkeypatch):
    """With a stand-in for the device: `fit` can read what this process reports."""
    monkeypatch.setattr(
        benchmarks, "measure", lambda device: [{"group": "a", "name": "b", "us": 2}]
    )
    npu = type("npu", (), {"get_device_name": staticmethod(lambda device: SOC)})
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    job = jobs.Job(jobs.MICROBENCHMARKS, "", "", "", "")
    result = child.judge(job, torch.device("cpu"), None, None)
    found = {"results": [{"kind": job.kind, "name": job.name} | result]}
    assert fit.measured(found) == (SOC, {("a", "b"): 2.0})
