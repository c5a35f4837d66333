"""Writes docs/npu-model.md and its plot: `python -m npu_ops_tools.model.validation.page`."""

from __future__ import annotations

import pathlib
import statistics

from npu_ops_tools.model import costs
from npu_ops_tools.model.validation import check
from npu_ops_tools.model.validation.check import Point

DOCS = pathlib.Path(__file__).parents[4] / "docs"
START, END = "<!-- written by page.py: from here -->", "<!-- to here -->"
SAID = {"model": "npu-model", "bytes_only": "bytes only", "waves_only": "waves only"}


def text(points: list[Point]) -> str:
    """The part of the page that numbers are in."""
    return "\n\n".join(
        [_gate(points), _by_op(points), _ranges(points), _constants(), _rows(points)]
    )


def write(points: list[Point], folder: pathlib.Path = DOCS) -> None:
    page = folder / "npu-model.md"
    before, _, rest = page.read_text().partition(START)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{START}\n\n{text(points)}\n\n{END}{after}")
    _plot(points, folder / "npu-model.png")


def _gate(points: list[Point]) -> str:
    rows = [("what", "rows", *SAID.values())]
    for name, chosen in (
        ("held out, above 10 us", check.judged(points)),
        ("held out, all", [point for point in points if point.held_out]),
        ("fitted on", [point for point in points if not point.held_out]),
    ):
        scores = [check.score(chosen, said) for said in SAID]
        rows.append((name, len(chosen), *(f"{s.median:.0%}, {s.rank:.2f}" for s in scores)))
    return "Median error, and Spearman's rank correlation with the measured times:\n\n" + _table(
        rows
    )


def _by_op(points: list[Point]) -> str:
    rows = [("op", "rows", "above 10 us", "model / measured", *SAID.values())]
    for op in dict.fromkeys(point.row.op for point in points):
        of_op = [point for point in points if point.row.op == op]
        long = [point for point in of_op if point.row.time > check.SHORT] or of_op
        held = "" if of_op[0].held_out else " (fitted)"
        bias = check.score(long).bias
        errors = (f"{check.score(long, said).median:.0%}" for said in SAID)
        count = sum(point.row.time > check.SHORT for point in of_op)
        rows.append((op + held, len(of_op), count, f"{bias:.2f}", *errors))
    note = "Median errors above 10 us (of all rows where an op has none):\n\n"
    return note + _table(rows)


def _ranges(points: list[Point]) -> str:
    low, high = spread(points)
    return (
        f"Of held-out rows above 10 us, four of five measured times are {low:.2f} to {high:.2f} "
        "times the predicted: the range that is printed with every prediction."
    )


def spread(points: list[Point]) -> tuple[float, float]:
    """The tenth and the ninetieth percentile of measured / predicted, and 1 between them."""
    ratios = [point.row.time / point.model for point in check.judged(points)]
    tenths = statistics.quantiles(ratios, n=10)
    return min(1.0, tenths[0]), max(1.0, tenths[-1])


def _constants() -> str:
    rows = [("family", *costs.FITTED, "fitted here")]
    for family in costs.families():
        prices = costs.of(family)
        values = (f"{getattr(prices, name):.4g}" for name in costs.FITTED)
        rows.append((family, *values, ", ".join(check.CONSTANTS.get(family, ())) or "none"))
    return "The constants (us; bytes a us; bytes):\n\n" + _table(rows)


def _rows(points: list[Point]) -> str:
    rows = [("op", "soc", "first shape", "dtype", "measured us", "npu-model us", "ratio")]
    for point in points:
        row = point.row
        shape = "x".join(map(str, row.shapes[0]))
        ratio = f"{point.model / row.time:.2f}"
        times = f"{row.time:.2f}", f"{point.model:.2f}"
        rows.append((row.op, row.soc, shape, row.dtypes[0], *times, ratio))
    return "<details><summary>Every row</summary>\n\n" + _table(rows) + "\n\n</details>"


def _table(rows: list[tuple]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _plot(points: list[Point], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    axes.set_prop_cycle(color=pyplot.cm.tab20.colors)
    for op in dict.fromkeys(point.row.op for point in points):
        of_op = [point for point in points if point.row.op == op]
        marker = "o" if of_op[0].held_out else "x"
        times = [point.row.time for point in of_op]
        axes.loglog(times, [p.model for p in of_op], marker, label=op, markersize=5, alpha=0.8)
    ends = [1, 6000]
    for factor, style in ((1, "-"), (1.3, ":"), (1 / 1.3, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="gray", linewidth=0.8)
    axes.set(xlabel="measured, us", ylabel="npu-model, us", title="o held out, x fitted, ... 30 %")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    write(check.points())
