"""Writes results as a self-contained HTML page, and the same as Markdown."""

from __future__ import annotations

import importlib.resources
import pathlib
from collections.abc import Iterable

import npu_ops
from npu_ops_tools.bench import rows as bench_rows
from npu_ops_tools.bench.rows import Row
from npu_ops_tools.report import page, plots, tables


def read(paths: Iterable[pathlib.Path]) -> dict:
    """Read the results of `npu-ops bench`, `npu-ops compile --csv` and the model's scripts, by
    kind.

    paths: files, or folders that contain such files; other files in a folder are ignored.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a file has another format, or a folder has no file with results.
    """
    found: dict = {"rows": [], "compiled": [], "predicted": []}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        files = sorted(path.glob("**/*.csv")) if path.is_dir() else [path]
        known = [file for file in files if _read(file, found)]
        if not known:
            raise ValueError(f"{path}: got another file, needs one that npu-ops bench wrote")
    return found


def _read(path: pathlib.Path, found: dict) -> bool:
    if tables.is_compiled(path):
        found["compiled"] += tables.compiled(path)
    elif tables.is_predicted(path):
        found["predicted"] += tables.predicted(path)
    elif tables.fields_of(path) >= set(bench_rows.FIELDS):
        found["rows"] += bench_rows.read(path)
    else:
        return False
    return True


def write(
    folder: pathlib.Path,
    rows: Iterable[Row] = (),
    compiled=(),
    predicted=(),
    comparison=None,
    found=None,
) -> pathlib.Path:
    """Write index.html and report.md to `folder`, with the parts that are given.

    compiled, predicted: see `read`. comparison, found: see `npu_ops_tools.demo` and `doctor`.
    """
    given = {
        "devices": page.devices(rows),
        "compiled": list(compiled),
        "predicted": list(predicted),
        "comparison": comparison,
        "found": found,
        "version": npu_ops.__version__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(_render("report.md", False, given))
    path = folder / "index.html"
    path.write_text(_render("report.html", True, given))
    return path


def _render(name: str, autoescape: bool, given: dict) -> str:
    import jinja2

    templates = importlib.resources.files("npu_ops_tools").joinpath("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(templates)), autoescape=autoescape,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"readable": page.readable, "plots": plots}
    environment.filters["short"] = plots.short
    return environment.get_template(name).render(given)


def curves(losses: dict[str, list[float]], title: str) -> plots.Plot:
    """Plot loss by step, one line for each name."""
    series = [
        plots.Series(name, f"s{n}", [plots.Point(x, y) for x, y in enumerate(values)])
        for n, (name, values) in enumerate(losses.items())
    ]
    return plots.lines(title, series, "step", "loss", log_x=False, log_y=False)
