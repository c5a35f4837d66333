"""Write the picture and table of docs/cpu-speed.md: a stable row of each op, with its spread.

    python benchmarks/cpu_speed.py

It reads benchmarks/results/cpu and writes between the two comments `speed`. For each op and sweep,
it chooses the largest size timed with gradients, and the peers at that size. If no size was timed
with gradients, it chooses the largest size timed without.
"""

import pathlib
import re

from npu_ops_tools.bench import rows
from npu_ops_tools.report import page, plots, summary

ROOT = pathlib.Path(__file__).parent.parent
HEAD = """| op | | ms (p20 to p80) | times as fast as (95 % interval) |
|---|---|--:|---|
"""
PICTURE = """<picture>
<source media="(prefers-color-scheme: dark)" srcset="report-dark.png">
<img src="report.png" alt="The report's first screen: how many times as fast each op is">
</picture>

"""


def table(found: list[rows.Row]) -> str:
    """Return a table with a line for each op and kind of call that has a stable row and peer.

    Raises:
        ValueError: the rows are from uncommitted changes, or from several commits, machines or
            numbers of threads.
    """
    origins = {(row.commit, row.dirty, row.machine, row.threads) for row in found}
    if len(origins) != 1 or next(iter(origins))[1]:
        raise ValueError(f"results: got rows of {sorted(origins)}, needs those of one clean commit")
    groups: dict[tuple, list[summary.Pair]] = {}
    for pair in summary.pairs(found):
        if pair.stable:
            kind = pair.ours.shape.rpartition(" of ")[0]
            groups.setdefault((pair.ours.op, kind), []).append(pair)
    return HEAD + "".join(_line(*key, pairs) for key, pairs in sorted(groups.items()))


def _line(op: str, kind: str, pairs: list[summary.Pair]) -> str:
    both = [pair for pair in pairs if pair.ours.mode == "forward+backward"] or pairs
    best = max(both, key=lambda pair: (pair.ours.dtype == "bfloat16", pair.ours.size)).ours
    mine = [pair for pair in both if pair.ours is best]
    ratios = ", ".join(f"{_ratio(pair)} {pair.peer.provider}" for pair in mine)
    what = f"{page.readable(best.shape)}, {best.size} {best.unit}, {best.mode}"
    times = f"{plots.short(best.ms_p50)} ({plots.short(best.ms_p20)} to {plots.short(best.ms_p80)})"
    return f"| `{op}` | {what} | {times} | {ratios} |\n"


def _ratio(pair: summary.Pair) -> str:
    low, high = pair.peer.ms_low / pair.ours.ms_high, pair.peer.ms_high / pair.ours.ms_low
    return f"**{pair.ratio:.1f}** ({low:.1f} to {high:.1f})"


def main() -> None:
    found = [row for row in rows.read(ROOT / "benchmarks" / "results" / "cpu")]
    timed = [row for row in found if row.state != "absent"]
    where = f"{timed[0].machine}, {timed[0].threads} threads, bf16, commit {timed[0].commit}.\n\n"
    written = ROOT / "docs" / "cpu-speed.md"
    text, times = re.subn(
        r"(<!-- speed -->\n).*?(<!-- speed -->)",
        lambda match: f"{match[1]}{PICTURE}{where}{table(timed)}{match[2]}",
        written.read_text(),
        flags=re.S,
    )
    if times != 1:
        raise ValueError(f"docs/cpu-speed.md: got {times} places for the table, needs one")
    written.write_text(text)


if __name__ == "__main__":
    main()
