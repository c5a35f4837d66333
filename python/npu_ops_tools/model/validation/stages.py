"""Times of Gated Delta Net's stages, measured by megagdn-pto (3a59190) on Ascend910B2."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Iterator

FILE = pathlib.Path(__file__).with_name("stages.csv")
SEEN = (32, 64)  # value heads of the rows that constants were fitted on (held_out.md)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of vllm-ascend's forward: packed sequences of `tokens` each, K = V = 128.

    us: the median of its measured times, None where nobody measured it. model: what npu-model says.
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
    def held_out(self) -> bool:
        return self.value_heads not in SEEN


def measured() -> Iterator[Stage]:
    """Without the sums of gates: 0.9 to 1.3 ms at every size, which is the host's time."""
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] != "cumsum":
                sizes = (row[n] for n in ("chunk", "sequences", "tokens", "heads", "value_heads"))
                yield Stage(row["stage"], *map(int, sizes), float(row["median_us"]))


def predicted(path: pathlib.Path) -> list[Stage]:
    """What benchmarks/model_stages.py wrote."""
    with path.open(newline="") as file:
        rows = {tuple(row.values())[:6]: float(row["model"]) for row in csv.DictReader(file)}
    return [
        dataclasses.replace(each, model=rows[tuple(map(str, dataclasses.astuple(each)[:6]))])
        for each in measured()
    ]
