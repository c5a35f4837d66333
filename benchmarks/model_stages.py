"""Compare npu-model with times that others measured: the stages of vllm-ascend's delta rule.

    python benchmarks/model_stages.py                       # every measured shape
    python benchmarks/model_stages.py --sequences 8 --tokens 2048 --heads 8 --value-heads 24

megagdn-pto (3a59190) timed vllm-ascend v0.18.0rc1's Triton kernels on Ascend910B2, stage by stage,
with event pairs and an emptied cache. Here each stage of vllm-ascend 0.18.0 is compiled and
modelled. The workspace has one buffer, as with the vendor's compiler of that time (ascendnpu-ir
1.1; 1.2 has four). `make fetch` puts vllm-ascend where this script looks for it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated

import peer_projects
import torch
import typer
from npu_ops_tools import model
from npu_ops_tools.model import costs
from npu_ops_tools.model.validation import stages
from npu_ops_tools.model.validation.stages import Stage
from peer_delta_rule import BF16, DIM, VLLM_STAGES, rows
from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parents[1]
SOC = "Ascend910B2"
ONE_BUFFER = (("set_workspace_multibuffer", 1),)
FUNCTIONS = {name: function for name, function in VLLM_STAGES.items() if name != "cumsum"}


def predict(stage: Stage) -> float:
    """Return the microseconds that npu-model predicts for a stage's launches."""
    launches = peer_projects.launches(FUNCTIONS[stage.name], arguments(stage))
    found = model.predict_all(
        [dataclasses.replace(x, options=(*x.options, *ONE_BUFFER)) for x in launches], SOC
    )
    return sum(each.us for each in found)


def arguments(stage: Stage) -> dict:
    """Return a stage's arguments: packed sequences of one length, whose values are never read."""
    tokens = stage.sequences * stage.tokens
    q, k = (rows(1, tokens, stage.heads, DIM) for _ in range(2))
    v, w = (rows(1, tokens, stage.value_heads, DIM) for _ in range(2))
    gates = torch.empty(1, tokens, stage.value_heads)
    beta = rows(1, tokens, stage.value_heads)
    square = rows(1, tokens, stage.value_heads, stage.chunk)
    states = rows(1, tokens // stage.chunk, stage.value_heads, DIM, DIM)
    given = {
        "kkt": {"k": k, "beta": beta, "g_cumsum": gates, "output_dtype": torch.float32},
        "solve_tril": {"A": square.float(), "output_dtype": BF16},
        "wy_fast": {"k": k, "v": v, "beta": beta, "A": square, "g_cumsum": gates},
        "chunk_h": {"k": k, "w": w, "u": v, "g": gates, "output_final_state": False},
        "chunk_o": {"q": q, "k": k, "v": v, "h": states, "g": gates, "scale": DIM**-0.5},
    }[stage.name]
    if stage.name not in ("solve_tril", "wy_fast"):
        given["chunk_size"] = stage.chunk
    starts = torch.arange(stage.sequences + 1, dtype=torch.int32) * stage.tokens
    return given | {"cu_seqlens": starts}


def stages_of(
    sequences: int, tokens: int, heads: int, value_heads: int, chunk: int
) -> Iterator[Stage]:
    """Yield the stages of a shape, with their measured times if there are any."""
    known = {dataclasses.replace(each, us=None): each for each in stages.measured()}
    for name in FUNCTIONS:
        asked = Stage(name, chunk, sequences, tokens, heads, value_heads, None)
        yield known.get(asked, asked)


def main(
    vllm: Annotated[pathlib.Path, typer.Option(help="Folder that contains vllm_ascend.")] = (
        ROOT / ".cache/vllm/0.18.0"
    ),
    stage: Annotated[str | None, typer.Option(help=f"One of {', '.join(FUNCTIONS)}.")] = None,
    sequences: int = 16,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence; 0: every measured shape.")] = 0,
    heads: int = 16,
    value_heads: int = 32,
    chunk: Annotated[
        int, typer.Option(help="Chunk size: 64, or 128 for wy_fast and chunk_h.")
    ] = 64,
    to: Annotated[pathlib.Path | None, typer.Option(help="CSV file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    peer_projects.import_from({"vllm": vllm})
    shape = sequences, tokens, heads, value_heads, chunk
    wanted = [
        each for each in (stages_of(*shape) if tokens else stages.measured())
        if stage in (None, each.name)
    ]  # fmt: skip
    found = [dataclasses.replace(each, model=predict(each)) for each in wanted]
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
    else:
        show(found)
    if to:
        write(found, to)


def show(found: list[Stage]) -> None:
    low, likely, high = costs.of(SOC).range_mixed
    table = Table("stage", "chunk", "sequences x tokens", "heads", "npu-model us", "likely",
                  "range", "measured us", "model / measured")  # fmt: skip
    for stage in found:
        us = stage.model
        table.add_row(
            stage.name, str(stage.chunk), f"{stage.sequences} x {stage.tokens}",
            f"{stage.heads}, {stage.value_heads}", f"{us:.0f}", f"{us * likely:.0f}",
            f"{us * low:.0f} to {us * high:.0f}",
            *((f"{stage.us:.0f}", f"{us / stage.us:.2f}") if stage.us else ("", "")),
        )  # fmt: skip
    Console(width=140).print(table)


def write(found: list[Stage], path: pathlib.Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(f.name for f in dataclasses.fields(Stage))
        out.writerows((*dataclasses.astuple(each)[:-1], f"{each.model:.1f}") for each in found)


if __name__ == "__main__":
    typer.run(main)
