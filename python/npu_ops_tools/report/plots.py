"""Computes plots: positions of marks, lines and labels. The template draws them as inline SVG.

Colours and fonts are the page's, so a plot follows dark mode and scales with the text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 300, 206
WIDE = 400  # width of a plot with categories
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 34
# Minimum distance of labels in pixels, horizontally and vertically.
LABEL_WIDTH, SIZE_WIDTH, LABEL_HEIGHT = 34, 23, 15
ROW_HEIGHT = 36  # pixels of a category, including its name above
LEAST = 1e-9  # lower limit of a logarithmic axis
MOST_TICKS = 6
LONGEST_LABEL = 6  # characters that fit into LEFT


@dataclasses.dataclass
class Point:
    """One measurement. low, high: the band around y. row: its row in the table, or None."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    title: str = ""
    row: int | None = None


@dataclasses.dataclass
class Series:
    """Points of one provider, sorted by x. style: colour and marker; "roof": a line for a bound."""

    name: str
    style: str
    points: list[Point]


@dataclasses.dataclass
class Axis:
    """Maps values to pixels; has labelled ticks."""

    ticks: list[tuple[float, str]]
    low: float
    high: float
    log: bool
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, max(value, self.low)
        if self.log:
            low, high, value = map(math.log10, (low, high, value))
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)


@dataclasses.dataclass
class Plot:
    """The data that the template draws.

    alt: the plot in a sentence.
    categories: names of rows, if the plot has rows instead of a vertical axis. Then a point's y is
    the number of its row.
    """

    title: str
    alt: str
    x: Axis
    y: Axis | None
    x_label: str
    y_label: str
    series: list[Series]
    height: float = HEIGHT
    categories: Sequence[str] = ()
    width: float = WIDTH

    def at(self, point: Point) -> tuple[float, float]:
        """Return a point's pixels."""
        y = self.y(point.y) if self.y else self.row(int(point.y))
        return self.x(point.x), y

    def row(self, number: int) -> float:
        return TOP + ROW_HEIGHT * number + 25

    def line(self, series: Series) -> str:
        """Return an SVG path through the points."""
        return "M" + "L".join(f"{x} {y}" for x, y in map(self.at, series.points))

    def band(self, series: Series) -> str:
        """Return an SVG polygon between the low and the high ends."""
        if len(series.points) < 2 or any(p.low is None for p in series.points):
            return ""
        ends = [(p.x, p.low) for p in series.points] + [(p.x, p.high) for p in series.points[::-1]]
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in ends)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Style and name of each series, for a legend."""
        return [(series.style, series.name) for series in self.series]

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM


def lines(title, series, x_label, y_label, log_x=True, log_y=True) -> Plot:
    """Make a plot of series over a size."""
    points = [point for each in series for point in each.points]
    xs = sorted({point.x for point in points})
    ends = [y for p in points for y in (p.y, p.low, p.high) if y is not None]
    x = _axis(xs, log_x, LEFT + 8, WIDTH - RIGHT - 12, SIZE_WIDTH, xs if log_x else None)
    y = _axis(ends, log_y, HEIGHT - BOTTOM, TOP + 4, LABEL_HEIGHT)
    return Plot(title, _alt(title, series, x_label, y_label), x, y, x_label, y_label, series)


def dots(title, series, categories, x_label) -> Plot:
    """Make a plot with a row of marks for each category, on one logarithmic axis."""
    points = [point for each in series for point in each.points]
    x = _axis([point.x for point in points], True, 14, WIDE - 20, LABEL_WIDTH)
    height = TOP + ROW_HEIGHT * len(categories) + BOTTOM + 4
    alt = f"{title}: {x_label} of {', '.join(s.name for s in series)} for {len(categories)} shapes"
    return Plot(title, alt, x, None, x_label, "", series, height, categories, WIDE)


def _alt(title, series, x_label, y_label) -> str:
    said = []
    for each in series:
        first, last = each.points[0], each.points[-1]
        to = f" to {short(last.y)} at {short(last.x)}" if first is not last else ""
        said.append(f"{each.name} {short(first.y)} at {short(first.x)}{to}")
    return f"{title}: {y_label} over {x_label}. {'; '.join(said)}."


def _axis(values, log, begin, end, apart, at=None) -> Axis:
    low, high = min(values), max(values)
    low, high = _widened(low, high, log)
    axis = Axis([], low, high, log, begin, end)
    for candidates in [at] if at else _candidates(low, high, log):
        ticks = [(axis(value), short(value)) for value in candidates]
        kept = _apart(ticks, apart) if at else ticks
        few = len(kept) <= MOST_TICKS or at
        few = few and all(len(label) <= LONGEST_LABEL for _, label in kept)
        if (
            few
            and len(kept) >= 2
            and all(abs(a - b) >= apart for (a, _), (b, _) in zip(kept, kept[1:], strict=False))
        ):
            axis.ticks = kept
            break
    else:
        axis.ticks = [(axis(value), short(value)) for value in (low, high)]
    return axis


def _widened(low, high, log):
    """Widen an axis range at both ends. Nearly equal limits count as equal."""
    if log:
        low, high = max(low, LEAST), max(high, LEAST)
        factor = 2 if math.isclose(low, high) else (high / low) ** 0.04
        return low / factor, high * factor
    margin = abs(high) if math.isclose(low, high) else high - low
    return (low - 0.04 * margin if low else 0.0), high + 0.06 * margin or 1.0


def _candidates(low, high, log):
    """Yield lists of round tick values, the longest first."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            yield [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        for step in (2, 3, 4):
            yield [10.0**p for p in powers if p % step == 0 and low <= 10.0**p <= high]
    # also for a range without two powers of ten
    for step in (n * 10.0**p for p in range(-9, 12) for n in (1, 2, 5)):
        if (high - low) / step <= 6:
            first = math.ceil(low / step)
            yield [n * step for n in range(first, math.floor(high / step) + 1)]


def _apart(ticks, apart):
    """Drop ticks that are too close; keep the last."""
    kept: list[tuple[float, str]] = []
    for tick in reversed(ticks):
        if not kept or abs(kept[-1][0] - tick[0]) >= apart:
            kept.append(tick)
    return kept[::-1]


def short(value: float) -> str:
    """Format a number with few characters: 0.02, 1.5, 32k."""
    if value and abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    for size, suffix in ((2**20, "M"), (1024, "k")):
        if value >= size and value % size == 0:
            return f"{int(value / size)}{suffix}"
    if value >= 10000:
        return f"{value / 1000:.3g}k"
    return f"{value:.4g}" if value >= 1000 else f"{value:.3g}"
