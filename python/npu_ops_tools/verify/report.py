"""Writes and reads the report: one JSON file and one page, without names of hosts or users."""

from __future__ import annotations

import collections
import getpass
import importlib.resources
import json
import pathlib
import re
import socket
import sys

from npu_ops_tools.verify.jobs import OF_AN_OP
from npu_ops_tools.where import ROOT

VERDICTS = ("right", "wrong", "declined", "not reached")
_HOMES = re.compile(r"/(?:home|Users)/[^/\s:'\"]+")
_ADDRESSES = re.compile(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")


def read(path: pathlib.Path) -> dict:
    """Read a report that `write` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is not such a report.
    """
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: got no JSON ({error}), needs a verify.json") from None
    if not isinstance(found, dict) or not {"format", "environment", "results"} <= found.keys():
        raise ValueError(f"{path}: got another file, needs one that npu-ops verify wrote")
    return found


def write(report: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write verify.json and verify.html."""
    folder.mkdir(parents=True, exist_ok=True)
    data, shown = folder / "verify.json", folder / "verify.html"
    data.write_text(json.dumps(report, indent=1) + "\n")
    shown.write_text(page(report))
    return [data, shown]


def wrong(report: dict) -> list[dict]:
    return [result for result in report["results"] if result["verdict"] == "wrong"]


def counts(report: dict) -> dict[str, int]:
    found = collections.Counter(result["verdict"] for result in report["results"])
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def summary(report: dict) -> str:
    """Return one line for each wrong result, then the counts of all verdicts."""
    said = [f"WRONG: {result['name']}: {result['why']}" for result in wrong(report)]
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in counts(report).items())
    return "\n".join([*said, f"{report['device']}, {report['mode']}: {numbers}"])


# Names


def scrubbed(value):
    """Remove the names of this host, its users and their folders from all texts in a value."""
    if isinstance(value, dict):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    return _scrubbed(value) if isinstance(value, str) else value


def _scrubbed(text: str) -> str:
    for folder, name in _folders():
        text = text.replace(folder, name)
    for word, name in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(word) > 2 and word not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(word)}\b", name, text)
    return _ADDRESSES.sub("<address>", _HOMES.sub("~", text))


def _folders() -> list[tuple[str, str]]:
    """Return folders of this machine, the longest first."""
    known = [(str(ROOT), "<npu-ops>"), (sys.prefix, "<python>"), (str(pathlib.Path.home()), "~")]
    return sorted(((path, name) for path, name in known if len(path) > 1), key=lambda x: -len(x[0]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no entry
        return ""


# The page


def page(report: dict) -> str:
    """Return the report as one self-contained HTML page."""
    import jinja2

    source = importlib.resources.files("npu_ops_tools").joinpath("templates/verify.html")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        source.read_text()
    )
    return template.render(
        report=report, counts=counts(report), wrong=wrong(report),
        table=list(_by_implementation(report)), times=list(_times(report)),
        declined=_declined(report), unknown=unknown(report), not_here=_not_here(report),
        facts=_facts(report["environment"]),
    )  # fmt: skip


def unknown(report: dict) -> list[str]:
    """Return the implementations for which no check was reached."""
    reached = {_who(r): False for r in report["results"] if r["kind"] in OF_AN_OP}
    for result in report["results"]:
        if result["kind"] in OF_AN_OP and result["verdict"] != "not reached":
            reached[_who(result)] = True
    return [who for who, known in reached.items() if not known]


def _who(result: dict) -> str:
    return f"{result['op']} by {result['implementation']}"


def _by_implementation(report: dict):
    """For each op and implementation: the count of each verdict, and the largest error."""
    groups = collections.defaultdict(list)
    for result in report["results"]:
        if result["kind"] in OF_AN_OP:
            groups[result["op"], result["implementation"]].append(result)
    for (op, implementation), results in groups.items():
        found = collections.Counter(result["verdict"] for result in results)
        used = [r["checks"]["values"].get("used", 0.0) for r in results if _has_values(r)]
        yield {
            "op": op, "implementation": implementation, "counts": found,
            "checks": {name: _state(results, name) for name in _CHECKS},
            "used": max(used, default=None),
            "backward_declined": next(
                (r["backward_declined"] for r in results if "backward_declined" in r), None
            ),
        }  # fmt: skip


_CHECKS = ("values", "bounds", "determinism", "streams", "graphs")


def _has_values(result: dict) -> bool:
    return "values" in result.get("checks", {})


def _state(results: list[dict], check: str) -> str:
    found = {r["checks"][check]["verdict"] for r in results if check in r.get("checks", {})}
    for verdict in ("wrong", "right", "not here"):
        if verdict in found:
            return verdict
    return "-"


def _times(report: dict):
    """Yield a row of times for each timed result; `length` is that of its bar, 0 to 1.

    A bar is the median forward time over the largest p80 among implementations of the same case.
    """
    timed = [result for result in report["results"] if result.get("times")]
    calls = collections.defaultdict(list)
    for result in timed:
        calls[result["op"], result["model"], result["case"], result["tokens"]].append(result)
    for results in calls.values():
        slowest = max(result["times"]["forward"]["p80"] for result in results)
        fastest = min(result["times"]["forward"]["p50"] for result in results)
        for result in results:
            times = result["times"]
            forward = times["forward"]
            yield {
                "result": result, "forward": forward, "backward": times.get("backward"),
                "host": times["host"], "length": forward["p50"] / slowest,
                "fastest": forward["p50"] == fastest,
                "predicted": result.get("predicted", {}).get("forward"),
            }  # fmt: skip


def _declined(report: dict) -> dict[tuple[str, str], list[str]]:
    """Return the cases that an implementation does not support, by its reason."""
    groups = collections.defaultdict(list)
    for result in report["results"]:
        if result["verdict"] == "declined" and result["kind"] in OF_AN_OP:
            groups[_who(result), result["why"]].append(f"{result['case']} in {result['dtype']}")
    return dict(groups)


def _not_here(report: dict) -> list[str]:
    """Return sentences on what this device lacks, or what was left out."""
    said = [
        check["detail"]
        for result in report["results"]
        for check in result.get("checks", {}).values()
        if check["verdict"] == "not here"
    ]
    said += [
        r["why"]
        for r in report["results"]
        if r["kind"] not in OF_AN_OP and r["verdict"] == "declined"
    ]
    return list(dict.fromkeys(said))


def _facts(environment: dict) -> dict[str, str]:
    machine = {n: v for n, v in environment.get("machine", {}).items() if v is not None}
    packages = ", ".join(f"{n} {v}" for n, v in environment.get("packages", {}).items())
    build = ", ".join(f"{n}: {v}" for n, v in environment.get("build", {}).items())
    return machine | {"npu-ops": environment.get("npu_ops"), "packages": packages, "built": build}
