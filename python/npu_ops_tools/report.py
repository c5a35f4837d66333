"""Reports: one HTML page, with nothing to load from elsewhere."""

from __future__ import annotations

import csv
import dataclasses
import importlib.resources
import io
import pathlib

import npu_ops
from npu_ops_tools.bench import FIELDS


@dataclasses.dataclass
class Timings:
    """The rows of one benchmark run."""

    title: str
    rows: list[dict]


def read_timings(path: pathlib.Path) -> Timings:
    """What `npu-ops bench` wrote.

    Raises:
        FileNotFoundError: there is no such file. ValueError: it has other columns.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    missing = set(FIELDS) - set(reader.fieldnames or ())
    if missing:
        raise ValueError(f"{path}: got no column {', '.join(sorted(missing))}, needs a bench CSV")
    return Timings(path.name, rows)


def write(folder: pathlib.Path, **parts) -> pathlib.Path:
    """Render index.html from those parts of the template that are given.

    timings: list of `Timings`. comparison, found: see `npu_ops_tools.demo` and `doctor`.
    """
    import jinja2

    source = importlib.resources.files("npu_ops_tools").joinpath("templates/report.html")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    defaults = {"timings": [], "comparison": None, "found": None, "version": npu_ops.__version__}
    timings = parts.pop("timings", [])
    parts["timings"] = [(run, speedups(run)) for run in timings if run.rows]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(environment.from_string(source.read_text()).render(defaults | parts))
    return path


def speedups(run: Timings) -> str:
    """A bar for each benchmark of npu-ops: how many times as fast as its baseline."""
    rows = [row for row in run.rows if row["impl"] == "npu_ops"]
    figure, axes = _figure(height=0.22 * len(rows) + 0.8)
    names = [f"{row['case']} {row['mode']} {row['dtype']}" for row in rows]
    bars = axes.barh(names, [float(row["speedup"]) for row in rows], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("times as fast as eager PyTorch, by the median of one run")
    return svg(figure)


def curves(losses: dict[str, list[float]], title: str) -> str:
    """Loss by step, a line for each name."""
    figure, axes = _figure(height=3.2, width=5.2)
    for (name, values), style in zip(losses.items(), ("-", "--", ":", "-."), strict=False):
        axes.plot(values, style, label=name)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.legend()
    return svg(figure)


def _figure(height: float, width: float = 9.0):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure) -> str:
    """A figure as an SVG element."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
