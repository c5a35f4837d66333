"""Finds the fastest implementation on this machine, by op, class of shape and dtype.

The implementations of an op run in a process of their own, as in `npu-ops verify`. Each is timed
only if its results are right. The output is a table that `npu_ops.core.preferences` reads. The
command: `npu-ops tune --help`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Iterator

from npu_ops.core import preferences
from npu_ops.core.models import MODELS
from npu_ops_tools.verify import jobs, worker

# Default models, with all their shapes; tokens for decoding, short and long prompts.
SHAPES = ("qwen3.5-9b", "qwen3-vl-8b", "qwen3-next-80b-a3b")
TOKENS = {"cpu": (1, 32, 512), "npu": (1, 64, 1024, 8192), "cuda": (1, 64, 1024, 8192)}
WORTH = 0.95  # required fraction of the default's time; smaller gains are noise


def plan(device: str, only: list[str], models: list[str], tokens: list[int]) -> list[jobs.Job]:
    """Return the timing jobs.

    Raises:
        ValueError: there is no such op or model, or the device has no meaningful times.
    """
    if device not in TOKENS:
        raise ValueError(f"device: got {device!r}, needs one of {', '.join(TOKENS)}, with times")
    unknown = set(models) - set(MODELS)
    if unknown:
        needs = ", ".join(MODELS)
        raise ValueError(f"model: got {', '.join(sorted(unknown))}, needs some of {needs}")
    chosen = (models or SHAPES, tokens or TOKENS[device])
    return [
        job
        for op in jobs.plan(device, False, only)
        for job in jobs.timed(op, jobs.implementations(op, device), *chosen)
    ]


def measure(
    device: str, planned: list[jobs.Job], modules: list[str], limit: float,
    say: Callable[[jobs.Job, dict], None],
) -> list[dict]:  # fmt: skip
    """Return the result of each job, see `verify.worker`; each op has its own process."""
    found = []
    for op in dict.fromkeys(job.op for job in planned):
        mine = worker.Worker(device, modules, {})
        try:
            for job in (job for job in planned if job.op == op):
                result = mine.do(job, limit)
                say(job, result)
                found.append(dataclasses.asdict(job) | result)
        finally:
            mine.stop()
    return found


def rows(results: list[dict]) -> list[dict]:
    """Make the table of preferences: the fastest implementation for each class of calls.

    Implementations with a wrong result anywhere are left out. The default implementation is kept
    unless another is clearly faster.
    """
    wrong = {(r["op"], r["implementation"]) for r in results if r["verdict"] == "wrong"}
    right = [r for r in results if r["verdict"] == "right"]
    right = [r for r in right if (r["op"], r["implementation"]) not in wrong]
    calls = collections.defaultdict(lambda: collections.defaultdict(dict))
    for result in right:
        call = (result["model"], result["case"], result["tokens"])
        for table, of_class in result["classes"].items():
            key = (table, of_class["dtype"], of_class["width"], of_class["bits"])
            calls[key][call][result["implementation"]] = _time(result, table)
    return [_row(key, list(each.values())) for key, each in calls.items()]


def _time(result: dict, table: str) -> float:
    """Return the median time in us."""
    mode = "backward" if table.endswith("_backward") else "forward"
    return result["times"][mode]["p50"]


def _row(key: tuple, calls: list[dict[str, float]]) -> dict:
    """Make the row of one class.

    calls: for each call, its time by implementation, in the order in which they are tried.
    """
    table, dtype, width, bits = key
    names = dict.fromkeys(name for call in calls for name in call)
    # If an implementation does not support a call, the first one that does runs it instead.
    times = {name: sum(call.get(name, _first(call)) for call in calls) for name in names}
    default = sum(_first(call) for call in calls)
    best = min(times, key=times.__getitem__)
    first = next(iter(names))
    chosen = best if times[best] < WORTH * default else first
    return {
        "op": table, "dtype": dtype, "width": width, "bits": bits, "implementation": chosen,
        "us": round(times[chosen], 2), "instead_of": first, "instead_us": round(default, 2),
    }  # fmt: skip


def _first(call: dict[str, float]) -> float:
    return next(iter(call.values()))


def table(soc: str, found: list[dict], environment: dict) -> dict:
    """Return the table to write: the rows and their provenance."""
    return {
        "format": preferences.FORMAT,
        "soc": soc,
        "made": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "packages": environment["packages"] | {"npu-ops": environment["npu_ops"]},
        "rows": found,
    }


def write(found: dict, folder: pathlib.Path) -> pathlib.Path:
    """Atomically write a table to a file in `folder` named after its SoC; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / preferences.file_name(found["soc"])
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(found, indent=1) + "\n")
    whole.replace(path)
    return path


def changed(found: list[dict]) -> list[dict]:
    """Return the rows that change which implementation runs."""
    return [row for row in found if row["implementation"] != row["instead_of"]]


def lines(found: list[dict]) -> Iterator[str]:
    """Format a table: what changes, and the number of classes."""
    for row in changed(found):
        speedup = row["instead_us"] / row["us"] if row["us"] else float("inf")
        yield (
            f"{row['op']}, {row['dtype']}, rows of {row['width']}, 2^{row['bits']} elements: "
            f"{row['implementation']} instead of {row['instead_of']}, {speedup:.2f} times as fast"
        )
    yield (
        f"{len(found)} classes, {len(changed(found))} of them with another implementation "
        "than before"
    )
