"""Writes docs/npu-model.md and its plot: `python -m npu_ops_tools.model.validation.page`."""

from __future__ import annotations

import csv
import pathlib
import statistics

from npu_ops_tools.model import costs
from npu_ops_tools.model.validation import check, stages
from npu_ops_tools.model.validation.check import Point

DOCS = pathlib.Path(__file__).parents[4] / "docs"
STAGES = DOCS.parent / "benchmarks" / "results" / "npu-model" / "stages.csv"
ROWS = STAGES.with_name("validation.csv")
START, END = "<!-- written by page.py: from here -->", "<!-- to here -->"
SAID = {"model": "npu-model", "bytes_only": "bytes only", "waves_only": "waves only"}


def text(points: list[Point]) -> str:
    """Return the part of the page that contains numbers."""
    return "\n\n".join([_summary(points), _by_op(points), _stages(), _ranges(points), _constants()])


def write(points: list[Point], folder: pathlib.Path = DOCS) -> None:
    page = folder / "npu-model.md"
    before, _, rest = page.read_text().partition(START)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{START}\n\n{text(points)}\n\n{END}{after}")
    _plot(points, folder / "npu-model.png")
    write_rows(points, ROWS)


def _summary(points: list[Point]) -> str:
    """Return the errors on held-out rows, which were not used to make the model."""
    kinds = {
        "vector cores": check.judged(points),
        "vector cores, likely time": check.likely(check.judged(points)),
        "matrix unit": check.judged(points, "cube"),
        "matrix unit, matmul of 128 rows and more (looked at)": looked_at(points),
        "both, Gated Delta Net's stages": [s for s in stages.predicted(STAGES) if s.held_out],
        "the same, looked at": [s for s in stages.predicted(STAGES) if not s.held_out],
    }
    rows = [("what", "rows", "median error", "model / measured", "rank")]
    for name, chosen in kinds.items():
        found = check.score(chosen)
        rows.append((name, found.count, f"{found.median:.0%}", f"{found.bias:.2f}",
                     f"{found.rank:.2f}"))  # fmt: skip
    baselines = ", ".join(
        f"{SAID[said]} {check.score(check.judged(points), said).median:.0%}"
        for said in ("bytes_only", "waves_only")
    )
    return (
        "Rows above 10 us that were held out ([which, and since when](../python/npu_ops_tools/"
        "model/validation/held_out.md)), and Spearman's rank correlation:\n\n"
        f"{_table(rows)}\n\nThe baselines on vector cores: {baselines}."
    )


def looked_at(points: list[Point]) -> list[Point]:
    """Return matrix products that were looked at to correct rates, except those with few rows."""
    return [
        point for point in points
        if point.row.op in check.LOOKED_AT and point.row.time > check.SHORT
        and point.row.shapes[0][0] >= 128
    ]  # fmt: skip


def _by_op(points: list[Point]) -> str:
    rows = [("op", "rows", "above 10 us", "model / measured", *SAID.values())]
    for op in dict.fromkeys(point.row.op for point in points):
        of_op = [point for point in points if point.row.op == op]
        long = [point for point in of_op if point.row.time > check.SHORT] or of_op
        held = "" if of_op[0].held_out else f" ({_seen(op)})"
        bias = check.score(long).bias
        # the baselines are fitted on rows of vector cores only
        shown = SAID if of_op[0].core == "vector" else ["model"]
        errors = [f"{check.score(long, said).median:.0%}" for said in shown]
        errors += [""] * (len(SAID) - len(errors))
        count = sum(point.row.time > check.SHORT for point in of_op)
        rows.append((op + held, len(of_op), count, f"{bias:.2f}", *errors))
    note = "Median errors above 10 us (of all rows where an op has none):\n\n"
    return note + _table(rows)


def _seen(op: str) -> str:
    return "fitted" if op in check.FITTED_ON else "looked at"


def _stages() -> str:
    rows = [("stage", "chunk", "rows", "measured", "model / measured")]
    found = stages.predicted(STAGES)
    for group in dict.fromkeys(each.group for each in found):
        of_stage = [each for each in found if each.group == group]
        times = [each.us / 1e3 for each in of_stage]
        ratios = [each.model / each.us for each in of_stage]
        rows.append((*group.split(), len(of_stage), f"{min(times):.1f} to {max(times):.1f} ms",
                     f"{min(ratios):.2f} to {max(ratios):.2f}"))  # fmt: skip
    return (
        "Stages of vllm-ascend's chunked delta rule, 16 sequences of 4096 to 16384 tokens, 16 to "
        f"64 value heads:\n\n{_table(rows)}"
    )


def _ranges(points: list[Point]) -> str:
    rows = [("kernel on", "at least", "likely", "at most")]
    for core in ("vector", "cube", "mixed"):
        rows.append((f"{core} cores", *(f"{each:.2f}" for each in spread(points, core))))
    without = _coverage(check.judged(points))
    return (
        "What is printed with every prediction: the time by the model, times these. Of five "
        "measured times four lie between the first and the last; likely is the median of the "
        f"operators'.\n\n{_table(rows)}\n\nA range made without an operator covers {without:.0%} "
        "of its held-out times on vector cores."
    )


def spread(points: list[Point], core: str = "vector") -> tuple[float, float, float]:
    """Return the 10th percentile, the median of operators, and the 90th percentile of measured /
    predicted.

    For cube cores all rows above 10 us count, because few are held out.
    """
    chosen = {
        "vector": lambda: check.judged(points),
        "cube": lambda: [p for p in points if p.core == "cube" and p.us > check.SHORT],
        "mixed": lambda: stages.predicted(STAGES),
    }
    return _spread(check.ratios(chosen[core]()))


def _spread(ratios: dict) -> tuple[float, float, float]:
    tenths = statistics.quantiles(sum(ratios.values(), []), n=10)
    likely = statistics.median(statistics.median(each) for each in ratios.values())
    return min(likely, tenths[0]), likely, max(likely, tenths[-1])


def _coverage(points: list[Point]) -> float:
    """Return the fraction of times that lie in the range derived from the other operators."""
    ratios, covered = check.ratios(points), 0
    for op, own in ratios.items():
        low, _, high = _spread({name: each for name, each in ratios.items() if name != op})
        covered += sum(low <= each <= high for each in own)
    return covered / len(points)


def _constants() -> str:
    rows = [("family", *costs.FITTED, "fitted here")]
    for family in costs.families():
        prices = costs.of(family)
        values = (f"{getattr(prices, name):.4g}" for name in costs.FITTED)
        rows.append((family, *values, ", ".join(check.CONSTANTS.get(family, ())) or "none"))
    return "The constants (us; bytes a us; bytes):\n\n" + _table(rows)


def write_rows(points: list[Point], path: pathlib.Path) -> None:
    """Write every row to a CSV for readers of the page."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(
            ("op", "soc", "shapes", "dtype", "held_out", "measured_us", "model_us", "source")
        )
        for point in points:
            row, shapes = point.row, " ".join("x".join(map(str, s)) for s in point.row.shapes)
            times = f"{row.time:.2f}", f"{point.model:.2f}"
            out.writerow(
                (row.op, row.soc, shapes, row.dtypes[0], point.held_out, *times, row.source)
            )


def _table(rows: list[tuple]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _plot(points: list[Point], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 5.5))
    of_cores = {core: [p for p in points if p.core == core] for core in ("vector", "cube")}
    of_cores["mixed"] = stages.predicted(STAGES)
    for axes, (core, found) in zip(panels, of_cores.items(), strict=True):
        _panel(axes, core, found)
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def _panel(axes, core: str, found: list) -> None:
    """Plot measured against predicted times of points or stages: o held out, x not."""
    from matplotlib import pyplot

    for color, group in enumerate(dict.fromkeys(each.group for each in found)):
        for held, marker in ((True, "o"), (False, "x")):
            times = [(e.us, e.model) for e in found if (e.group, e.held_out) == (group, held)]
            if times:
                axes.loglog(*zip(*times, strict=True), marker, label=group, markersize=5, alpha=0.8,
                            color=pyplot.cm.tab20.colors[color % 20])  # fmt: skip
    ends = [min(each.us for each in found), max(each.us for each in found)]
    for factor, style in ((1, "-"), (1.3, ":"), (1 / 1.3, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="gray", linewidth=0.8)
    axes.set(xlabel="measured, us", ylabel="npu-model, us", title=f"{core}: o held out, ... 30 %")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, fontsize=7)


if __name__ == "__main__":
    write(check.points())
