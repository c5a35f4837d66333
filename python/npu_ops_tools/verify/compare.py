"""Compares two reports: what became wrong or right, slower or faster."""

from __future__ import annotations

from collections.abc import Iterator


def compare(before: dict, after: dict) -> dict:
    """Return the differences between two reports.

    Returns:
        "environment": facts that differ, each with both values.
        "newly wrong", "newly right", "not in both": names of calls.
        "times": for each call timed in both reports, "ratio" of its time after to before, and
        "apart": whether the p20 to p80 ranges are disjoint.
    """
    old, new = ({r["name"]: r for r in report["results"]} for report in (before, after))
    both = [name for name in new if name in old]
    timed = [name for name in both if old[name].get("times") and new[name].get("times")]
    return {
        "environment": dict(_differing(_flat(before), _flat(after))),
        "newly wrong": [n for n in new if _is(new, n, "wrong") and not _is(old, n, "wrong")],
        "newly right": [n for n in both if _is(new, n, "right") and _is(old, n, "wrong")],
        "not in both": sorted(set(old) ^ set(new)),
        "times": {name: _ratio(old[name], new[name]) for name in timed},
    }


def _is(results: dict, name: str, verdict: str) -> bool:
    return name in results and results[name]["verdict"] == verdict


def _flat(report: dict) -> dict[str, object]:
    environment = report["environment"]
    facts = {"device": report.get("device"), "npu-ops": environment.get("npu_ops")}
    return facts | environment.get("machine", {}) | environment.get("packages", {})


def _differing(old: dict, new: dict) -> Iterator[tuple[str, tuple]]:
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield name, (old.get(name), new.get(name))


def _ratio(old: dict, new: dict) -> dict:
    old, new = old["times"]["forward"], new["times"]["forward"]
    apart = old["p80"] < new["p20"] or new["p80"] < old["p20"]
    return {"ratio": new["p50"] / old["p50"], "apart": apart}


def lines(found: dict) -> Iterator[str]:
    """Format a comparison as lines of text."""
    for name, (old, new) in found["environment"].items():
        yield f"{name}: {old} -> {new}"
    for what in ("newly wrong", "newly right", "not in both"):
        yield from (f"{what}: {name}" for name in found[what])
    times = sorted(found["times"].items(), key=lambda item: -item[1]["ratio"])
    for name, time in times:
        if time["apart"]:
            slower = "slower" if time["ratio"] > 1 else "faster"
            yield f"{slower}: {name}: {time['ratio']:.2f} times the old time"
    alike = sum(not time["apart"] for time in found["times"].values())
    yield f"{alike} of {len(times)} times did not change, {len(found['newly wrong'])} newly wrong"
