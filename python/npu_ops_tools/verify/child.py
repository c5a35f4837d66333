"""The process that runs checks: reads jobs, one JSON object per line, and writes the results.

`python -m npu_ops_tools.verify.child DEVICE [MODULE...]`. Its first line describes the machine.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time

import torch

import npu_ops
from npu_ops.core.hardware import first_line
from npu_ops_tools.verify import checks, jobs


def main() -> None:
    device, *modules = sys.argv[1:]
    # Redirect other output, also of native code, to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what) -> None:
        print(json.dumps(what), file=answers, flush=True)

    for module in modules:
        importlib.import_module(module)
    here = torch.device(jobs.torch_device(device), 0)
    torch.zeros(1, dtype=torch.float32, device=here)  # fail early on a broken device
    # import npu-ops' operators before the first job
    npu_ops.explain("l2norm", torch.zeros((1, 8), dtype=torch.float32, device=here))
    say(ready=environment(device))
    expected = checks.Expected()
    for line in sys.stdin:
        say(done=judge(jobs.Job(**json.loads(line)), here, expected, lambda at: say(at=at)))


def judge(job: jobs.Job, device: torch.device, expected: checks.Expected, note) -> dict:
    """Return a job's result: verdict, checks, times."""
    start, found = time.perf_counter(), {}
    try:
        if job.kind == jobs.MICROBENCHMARKS:
            verdict, why = _microbenchmarks(device, found)
        else:
            verdict, why = _judge(job, device, expected, note, found)
    except checks.Declined as error:
        verdict, why = "declined", str(error)
    except Exception as error:  # any exception of an implementation is a finding
        verdict, why = checks.WRONG, f"{type(error).__name__}: {first_line(error)}"
    return found | {"verdict": verdict, "why": why, "seconds": time.perf_counter() - start}


def _judge(job, device, expected, note, found: dict) -> tuple[str, str]:
    subject = checks.Subject(job, device)
    subject.refuse_what_it_declines()
    if job.kind == "time":
        wrong = _timed(subject, expected, note, found)
    else:
        found["checks"] = {}
        for name, result in checks.check(subject, expected, note):
            found["checks"][name] = result
        wrong = [f"{n}: {r['detail']}" for n, r in found["checks"].items() if _is_wrong(r)]
    if subject.backward_declined:
        found["backward_declined"] = subject.backward_declined
    return (checks.WRONG, "; ".join(wrong)) if wrong else (checks.RIGHT, "")


def _microbenchmarks(device: torch.device, found: dict) -> tuple[str, str]:
    from npu_ops_tools.model.calibration import benchmarks

    found["soc"] = torch.npu.get_device_name(device)
    found[jobs.MICROBENCHMARKS] = benchmarks.measure(device)
    return checks.RIGHT, ""


def _is_wrong(result: dict) -> bool:
    return result["verdict"] == checks.WRONG


def _timed(subject: checks.Subject, expected: checks.Expected, note, found: dict) -> list[str]:
    """Time a call if its values are right."""
    from npu_ops_tools.verify import times

    note("values")
    result = checks.values(subject, subject.results(), expected.of(subject))
    if _is_wrong(result):
        return [f"values: {result['detail']}"]
    found["classes"] = times.classes(subject)
    note("times")
    found["times"] = times.measure(subject)
    if subject.device.type == "npu" and subject.job.implementation == "triton_ascend":
        note("prediction")
        found["predicted"] = times.predicted(subject, torch.npu.get_device_name(subject.device))
    return []


def environment(device: str) -> dict:
    """Return a description of the machine: SoC, driver, CANN, versions, npu-ops' build."""
    from npu_ops_tools import doctor, known_bad

    versions = {name: doctor.version(name, module) for name, module in doctor.PACKAGES.items()}
    emulated = checks.is_emulated()  # the emulated NPU does not need CANN's folders
    build = {n: value for n, value in npu_ops.build_info().items() if value is not None}
    return {
        "device": device,
        "machine": doctor.machine() | {"driver": _driver(), "gpu": _gpu(device)},
        "packages": {name: version for name, version in versions.items() if version},
        "npu_ops": npu_ops.__version__,
        "build": build,
        "known bad": []
        if emulated
        else [p["what"] for p in known_bad.problems(versions) if not p["when"]],
    }


def _driver() -> str | None:
    """Return the version of Ascend's driver, if installed."""
    path = pathlib.Path("/usr/local/Ascend/driver/version.info")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.partition("=")[2].strip() for line in lines if line.startswith("Version="))
    return next(found, None)


def _gpu(device: str) -> str | None:
    return torch.cuda.get_device_name(0) if device == "cuda" else None


if __name__ == "__main__":
    main()
