"""Summarizes rows: the speedup over each peer, and the worst case."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from npu_ops_tools.bench.rows import Row
from npu_ops_tools.bench.work import OURS

# npu-ops counts as slower than the fastest peer below this speedup: timers are not more precise.
LEVEL = 0.97


@dataclasses.dataclass(frozen=True)
class Pair:
    """npu-ops' row and a peer's row of one benchmark. ratio: speedup of npu-ops."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        return self.peer.ms_p50 / self.ours.ms_p50

    @property
    def faster(self) -> bool:
        return self.ratio > 1

    @property
    def stable(self) -> bool:
        return self.ours.state == self.peer.state == "stable"


@dataclasses.dataclass(frozen=True)
class Against:
    """npu-ops against one family of peers, e.g. SDPA, in the benchmarks of an op.

    pairs: those whose two times are stable.
    left_out: number of other pairs.
    """

    op: str
    peer: str
    pairs: tuple[Pair, ...]
    left_out: int

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios."""
        return math.exp(sum(math.log(pair.ratio) for pair in self.pairs) / len(self.pairs))

    @property
    def worst(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.ratio)


def family(provider: str) -> str:
    """Return the family of a provider: `SDPA` for `SDPA, keys gathered`."""
    return provider.partition(",")[0]


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """Pair npu-ops' rows with each peer's timed row. Rows "npu-ops NAME" are not paired."""
    timed = [row for row in rows if row.state != "absent"]
    ours = {row.benchmark: row for row in timed if row.provider == OURS}
    return [
        Pair(ours[row.benchmark], row)
        for row in timed
        if row.benchmark in ours and not row.provider.startswith(OURS)
    ]


def against(rows: Iterable[Row]) -> list[Against]:
    """Compare each op with each family of peers; unstable pairs are excluded."""
    groups = collections.defaultdict(list)
    for pair in pairs(rows):
        groups[pair.ours.op, family(pair.peer.provider)].append(pair)
    return [
        Against(op, peer, stable, len(found) - len(stable))
        for (op, peer), found in groups.items()
        for stable in [tuple(pair for pair in found if pair.stable)]
    ]


def slower(rows: Iterable[Row]) -> list[Pair]:
    """Return stable pairs with a benchmark's fastest peer and a ratio below LEVEL; lowest first."""
    best: dict[tuple, Pair] = {}
    for pair in pairs(rows):
        if pair.stable and pair.ratio < best.get(pair.ours.benchmark, pair).ratio + 1e-12:
            best[pair.ours.benchmark] = pair
    return sorted((p for p in best.values() if p.ratio < LEVEL), key=lambda p: p.ratio)
