"""Reads times of Gated Delta Net's stages: megagdn-pto (3a59190) measured them on Ascend910B2."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Iterator

FILE = pathlib.Path(__file__).with_name("stages.csv")
SEEN = (32, 64)  # value heads of the rows that are not held out (held_out.md)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of vllm-ascend's forward: packed sequences of `tokens` each, K = V = 128.

    us: the median of its measured times; None if not measured. model: npu-model's prediction.
    """

    name: str
    chunk: int
    sequences: int
    tokens: int
    heads: int
    value_heads: int
    us: float | None
    model: float | None = None

    @property
    def group(self) -> str:
        """The kernel, by which rows are grouped."""
        return f"{self.name} {self.chunk}"

    @property
    def held_out(self) -> bool:
        return self.value_heads not in SEEN


def measured() -> Iterator[Stage]:
    """Yield the measured stages, except sums of gates.

    A sum of gates took 0.9 to 1.3 ms at every size, so its time is the host's.
    """
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] != "cumsum":
                yield _stage(row["stage"], row, float(row["median_us"]))


def predicted(path: pathlib.Path) -> list[Stage]:
    """Return measured stages with npu-model's times, from the CSV that model_stages.py writes."""
    with path.open(newline="") as file:
        return [
            _stage(row["name"], row, float(row["us"]), float(row["model"]))
            for row in csv.DictReader(file)
        ]


def _stage(name: str, row: dict[str, str], *times: float) -> Stage:
    sizes = (row[n] for n in ("chunk", "sequences", "tokens", "heads", "value_heads"))
    return Stage(name, *map(int, sizes), *times)
