"""Serve a tiny Qwen3-VL by SGLang's engine with npu-ops, for text and a picture: make demo-serve.

python tests/adapters/serve_sglang.py

The weights are random. The demo shows which operators ran, and that the tokens are those that
transformers generates with the same weights.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import sglang_process
from rich.console import Console
from rich.table import Table

MODEL = "qwen3vl"


def main(console: Console) -> bool:
    """Run the demo; return whether all tokens are those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        console.print("making the model, and generating with transformers")
        sglang_process.run("tiny", folder, MODEL, NPU_OPS_DISABLE="all")
        model = pathlib.Path(folder) / MODEL
        console.print("starting SGLang's engine")
        arguments = (model, "mm_attention_backend=ascend_attn")
        rows, said = sglang_process.run("engine", *arguments, NPU_OPS_LOG="calls")
        expected = json.loads((model / "expected.json").read_text())
    same = [show(console, prompt, tokens, expected[prompt]) for _, prompt, tokens in rows]
    grid = Table("operator", "implementation", "calls", title="what SGLang's scheduler called")
    for (op, implementation), count in sorted(sglang_process.calls(said).items()):
        grid.add_row(op, implementation, str(count))
    console.print(grid)
    return all(same) and len(same) == len(expected)


def show(console: Console, prompt: str, tokens: list, expected: tuple) -> bool:
    given, following = expected
    mark = "[green]as transformers[/]" if tokens == following else f"[red]not {following}[/]"
    console.print(f"{prompt}, {len(given)} tokens -> {tokens} {mark}", highlight=False)
    return tokens == following


if __name__ == "__main__":
    sys.exit(not main(Console()))
