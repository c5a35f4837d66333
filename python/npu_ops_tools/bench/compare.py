"""Compares two results of the same benchmarks: how much slower or faster npu-ops became."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from npu_ops_tools.bench.rows import Row
from npu_ops_tools.bench.work import OURS


@dataclasses.dataclass(frozen=True)
class Change:
    """Compares one benchmark's time before and after a change.

    ratio: new over old median. low, high: its bounds, from the 95 % intervals of both medians.
    """

    old: Row
    new: Row
    ratio: float
    low: float
    high: float

    def __str__(self):
        state = "" if self.old.state == self.new.state == "stable" else "  unstable"
        return f"{self.ratio:6.3f} ({self.low:.3f} to {self.high:.3f})  {self.new.name}{state}"


def compare(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """Compare npu-ops' rows that are in both results; the largest slowdown comes first.

    Raises:
        ValueError: no benchmark is in both with the same machine and number of threads.
    """
    before = {row.key: row for row in old if _timed(row)}
    changes = [_change(before[row.key], row) for row in new if _timed(row) and row.key in before]
    if not changes:
        raise ValueError(
            "compare: got results without a common benchmark, needs one with the same "
            "machine and threads"
        )
    return sorted(changes, key=lambda change: -change.ratio)


def _timed(row: Row) -> bool:
    return row.provider.startswith(OURS) and row.state != "absent"


def _change(old: Row, new: Row) -> Change:
    return Change(
        old, new, new.ms_p50 / old.ms_p50, new.ms_low / old.ms_high, new.ms_high / old.ms_low
    )


def slower(changes: Iterable[Change], threshold: float) -> list[Change]:
    """Return the changes whose ratio exceeds 1 + `threshold` even at the low end of its range."""
    return [change for change in changes if change.low > 1 + threshold]
