"""Makes the parts of a page of benchmark results: devices, their ops, figures and tables."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterable

import npu_ops
from npu_ops_tools import where
from npu_ops_tools.bench.rows import Row
from npu_ops_tools.bench.work import OURS
from npu_ops_tools.report import plots, summary
from npu_ops_tools.report.plots import Plot, Point, Series

MODES = ("forward", "backward", "forward+backward")
WIDE = 1.5  # limit for the ratio of the 80th percentile to the 20th
STYLES = 7  # colours and markers of the page; npu-ops has the first


@dataclasses.dataclass
class Figure:
    """Plots of the same work. more: collapsed plots. command: repeats all of its measurements."""

    title: str
    plots: list[Plot]
    more: list[Plot]
    legend: list[tuple[str, str]]
    command: str


@dataclasses.dataclass
class Section:
    """An op on a device. table: (row, its number for links, speedup of npu-ops over it)."""

    op: str
    about: str
    against: list[summary.Against]
    slower: list[summary.Pair]
    figures: list[Figure]
    table: list[tuple[Row, int, float | None]]
    absent: list[Row]

    @property
    def by_peer(self) -> dict[str, summary.Against]:
        return {each.peer: each for each in self.against}

    @property
    def providers(self) -> list[str]:
        return sorted({row.provider for row, _, _ in self.table})


@dataclasses.dataclass
class Device:
    """All measurements of one machine with one number of threads."""

    name: str
    rows: list[Row]
    sections: list[Section]
    peers: list[str]

    @property
    def commits(self) -> str:
        """The commits of the rows; uncommitted changes are mentioned."""
        found = collections.Counter(
            f"{row.commit}{', with changes that are not committed' if row.dirty else ''}"
            for row in self.rows
        )
        return "; ".join(f"{commit} ({count} rows)" for commit, count in found.items())

    @property
    def id(self) -> str:
        """The id for the page's anchors."""
        return re.sub(r"\W+", "-", self.name).strip("-").lower()

    @property
    def npu(self) -> bool:
        return self.name.startswith("npu")

    @property
    def versions(self) -> str:
        return "; ".join(sorted({row.versions for row in self.rows}))

    @property
    def dates(self) -> str:
        days = sorted({row.timestamp[:10] for row in self.rows})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"

    @property
    def unstable(self) -> int:
        return sum(row.state == "unstable" for row in self.rows)

    @property
    def wide(self) -> int:
        """Number of stable rows with a wide spread of times."""
        stable = [row for row in self.rows if row.state == "stable"]
        return sum(row.ms_p80 > WIDE * row.ms_p20 for row in stable)

    @property
    def behind(self) -> list[summary.Against]:
        """Peers that are faster than npu-ops on average."""
        found = [each for s in self.sections for each in s.against if each.pairs]
        return [each for each in found if each.mean < summary.LEVEL]

    @property
    def pairs(self) -> list[summary.Pair]:
        """The pairs that the headline counts."""
        return [pair for s in self.sections for each in s.against for pair in each.pairs]


def devices(rows: Iterable[Row]) -> list[Device]:
    """Group rows by machine and number of threads: different groups never share a plot."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.device, row.machine, row.threads].append(row)
    return [_device(*key, found) for key, found in groups.items()]


def _device(device, machine, threads, rows) -> Device:
    timed = [row for row in rows if row.state != "absent"]
    styles = _styles(timed)
    numbers = {row.key: number for number, row in enumerate(timed)}
    ops = collections.defaultdict(list)
    for row in rows:
        ops[row.op].append(row)
    sections = [_section(op, found, styles, numbers) for op, found in sorted(ops.items())]
    peers = list(dict.fromkeys(each.peer for s in sections for each in s.against))
    peers.sort(key=lambda peer: -sum(each.peer == peer for s in sections for each in s.against))
    many = f", {threads} thread{'' if threads == 1 else 's'}"
    name = f"{device}: {machine}{many if device == 'cpu' else ''}"
    return Device(name, timed, sections, peers)


def _styles(rows: list[Row]) -> dict[str, str]:
    """Assign styles, so that a provider looks the same in every plot."""
    names = collections.Counter(row.provider for row in rows if row.provider != OURS)
    others = [name for name, _ in names.most_common()]
    styles = {name: f"s{1 + n % (STYLES - 1)}" for n, name in enumerate(others)}
    return {OURS: "s0"} | styles


def _section(op: str, rows: list[Row], styles, numbers) -> Section:
    timed = [row for row in rows if row.state != "absent"]
    ratios = {pair.peer.key: pair.ratio for pair in summary.pairs(timed)}
    table = [(row, numbers[row.key], ratios.get(row.key)) for row in timed]
    return Section(
        op, _about(op), summary.against(timed), summary.slower(timed),
        list(_figures(op, timed, styles, numbers)), table,
        [row for row in rows if row.state == "absent"],
    )  # fmt: skip


def _about(op: str) -> str:
    """Return the first line of the docstring of the op's first public function."""
    functions = where.ops().get(op, [])
    return (
        getattr(npu_ops, functions[0]).__doc__.partition("\n")[0].replace("`", "")
        if functions
        else ""
    )


def _figures(op: str, rows: list[Row], styles, numbers):
    """Yield line plots over sizes, then a plot of marks for models and dtypes of one size."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.shape, row.unit, row.dtype, row.mode].append(row)
    lone = []
    for key in sorted(groups, key=lambda key: (*map(str, key[:3]), MODES.index(key[3]))):
        if len({row.size for row in groups[key]}) > 1:
            yield _over_sizes(op, *key, groups[key], styles, numbers)
        else:
            lone += groups[key]
    lone.sort(key=_kind)
    for (sweep, unit, mode), found in itertools.groupby(lone, _kind):
        yield _over_shapes(op, sweep, unit, MODES[mode], list(found), styles, numbers)


def _kind(row: Row):
    sweep, of, _ = row.shape.partition(" of ")
    return sweep if of else "", row.unit, MODES.index(row.mode)


def _over_sizes(op, shape, unit, dtype, mode, rows, styles, numbers) -> Figure:
    by_provider = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row.size):
        by_provider[row.provider].append(row)
    title = f"{readable(shape)}, {dtype}, {mode}"

    def series(value, **more):
        found = [
            Series(name, styles[name], [
                Point(row.size, value(row), hollow=row.state != "stable", title=_said(row),
                      **{key: f(row) for key, f in more.items()})
                for row in mine if value(row) is not None
            ])
            for name, mine in sorted(by_provider.items(), key=lambda item: styles[item[0]])
        ]  # fmt: skip
        return [each for each in found if each.points]

    def plot(what, found, y_label, **options):
        return plots.lines(what, found, unit, y_label, **options)

    time = series(
        lambda r: r.ms_p50, low=lambda r: r.ms_p20, high=lambda r: r.ms_p80,
        row=lambda r: numbers[r.key],
    )  # fmt: skip
    shown = [plot("Time", time, "ms")]
    if rows[0].flop:
        unit_of_rate, times = ("GFLOP/s", 1e3) if rows[0].matmul_tflops < 10 else ("TFLOP/s", 1)
        roof = {row.size: row.matmul_tflops * times for row in rows}
        rate = [*series(lambda r: r.tflops * times), _roof("a matrix product", roof)]
        shown.append(plot("Rate", rate, unit_of_rate))
    else:
        roof = {row.size: row.copy_gbps for row in rows}
        rate = [*series(lambda r: r.gbps), _roof("a copy of as many bytes", roof)]
        shown.append(plot("Rate", rate, "GB/s"))
    more = []
    # Show an error of 0, too, at the axis' lower end.
    errors = series(lambda r: None if r.error is None else max(r.error, plots.LEAST))
    if errors:
        more.append(plot("Error", errors, "RMS of error / RMS of result"))
    memory = series(lambda r: r.peak_mb)
    if memory:
        more.append(plot("Memory beyond the inputs", memory, "MB", log_y=False))
    legend = [(each.style, each.name) for each in time] + [("roof", rate[-1].name)]
    command = _command(op, f"{shape},", f", {mode}, {dtype}")
    return Figure(title, shown, more, legend, command)


def _roof(name: str, values: dict) -> Series:
    return Series(name, "roof", [Point(x, y) for x, y in sorted(values.items()) if y])


def _over_shapes(op, sweep, unit, mode, rows, styles, numbers) -> Figure:
    names = list(dict.fromkeys(_shape(row) for row in rows))
    by_provider = collections.defaultdict(list)
    for row in rows:
        by_provider[row.provider].append(row)
    series = [
        Series(name, styles[name], [
            Point(row.ms_p50, names.index(_shape(row)), hollow=row.state != "stable",
                  title=_said(row), row=numbers[row.key]) for row in mine
        ])
        for name, mine in sorted(by_provider.items(), key=lambda item: styles[item[0]])
    ]  # fmt: skip
    sizes = sorted({row.size for row in rows})
    what = f"{sweep}: other" if sweep else "Other"
    title = f"{what} models, ranks and dtypes, {', '.join(map(str, sizes))} {unit}, {mode}"
    plot = plots.dots("Time", series, names, "ms")
    legend = [(each.style, each.name) for each in series]
    return Figure(title, [plot], [], legend, _command(op, f", {mode},", f"{sizes[0]} {unit}"))


def _shape(row: Row) -> str:
    return f"{readable(row.shape.rpartition(' of ')[2])}, {row.dtype}"


def _command(op: str, *parts: str) -> str:
    return shlex.join(["npu-ops", "bench", op, *(x for part in parts for x in ("--only", part))])


def _said(row: Row) -> str:
    """Describe a mark in words."""
    spread = f"{row.ms_p50:.4g} ms (p20 {row.ms_p20:.4g}, p80 {row.ms_p80:.4g})"
    state = "" if row.state == "stable" else ", unstable"
    return f"{row.provider}, {row.size} {row.unit}: {spread}{state}"


def readable(shape: str) -> str:
    """Format a shape: `qwen3.5-9b = qwen3-next-80b-a3b tp4` -> `Qwen3.5-9B, Qwen3-Next-80B,
    TP4`."""
    sweep, of, models = shape.rpartition(" of ")
    models, _, ranks = models.rpartition(" tp")
    names = [re.sub(r"-a\d+b$", "", name) for name in models.split(" = ")]
    names = ["-".join(_word(part) for part in name.split("-")) for name in names]
    return f"{sweep}{': ' if of else ''}{', '.join(names)}, TP{ranks}"


def _word(part: str) -> str:
    return part.upper() if part in ("vl",) or part[:1].isdigit() else part.capitalize()
