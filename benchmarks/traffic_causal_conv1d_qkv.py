"""Count the bytes per token of Gated Delta Net's front end, fused and in its three parts.

    npu-ops emulate -- python benchmarks/traffic_causal_conv1d_qkv.py

Counts the loads and stores of kernels and torch operators on the emulated NPU, as
traffic_chunk_gated_delta_rule.py does. The result is the difference between 512 and 256 tokens,
with 16 key heads and 32 value heads of 128, in bf16.
"""

from __future__ import annotations

import csv
import pathlib
import sys

import torch
from traffic_chunk_gated_delta_rule import DIM, HEADS, VALUE_HEADS, counted

from npu_ops.ops.causal_conv1d import op as conv
from npu_ops.ops.causal_conv1d_qkv import op
from npu_ops.ops.l2norm import op as norm

KEYS, VALUES, EPS = HEADS * DIM, VALUE_HEADS * DIM, 1e-6
FIELDS = ("form", "pass", "kernel", "loaded", "stored")
RESULTS = pathlib.Path(__file__).parent / "results" / "traffic" / "front-npu-emulated.csv"


def moved(tokens: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the bytes loaded and stored by ("form pass", kernel)."""
    draw = torch.Generator().manual_seed(0)
    channels = 2 * KEYS + VALUES
    x, weight = (
        torch.randn(shape, generator=draw).bfloat16().npu()
        for shape in ((1, tokens, channels), (channels, 4))
    )
    found = {}
    # Called without torch's dispatcher, which would hide the operators inside.
    with counted("fused forward", found):
        heads = [HEADS, VALUE_HEADS, DIM, DIM]
        *qkv, _ = op.forward.run(x, weight, None, None, None, True, EPS, heads, False)
    grads = [torch.ones_like(part) for part in qkv]
    with counted("fused backward", found):
        op.backward.run(*grads, None, x, weight, None, None, None, True, EPS, heads)
    with counted("parts forward", found):
        y, _ = conv.forward.run(x, weight, None, None, None, None, True, False)
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in y.split([KEYS, KEYS, VALUES], -1))
        norm.forward.run(q, EPS, q.dtype), norm.forward.run(k, EPS, k.dtype), v.contiguous()
    with counted("parts backward", found):
        grads[:2] = norm.backward.run(grads[0], q, EPS), norm.backward.run(grads[1], k, EPS)
        grad = torch.cat([grad.flatten(2) for grad in grads], dim=-1)
        conv.backward.run(grad, None, x, weight, None, None, None, True)
    return found


def main() -> None:
    small, large = moved(256), moved(512)
    rows = []
    for (name, kernel), (loaded, stored) in large.items():
        before = small[name, kernel]
        rows.append([*name.split(), kernel, (loaded - before[0]) / 256, (stored - before[1]) / 256])
    for name in dict.fromkeys(name for name, _ in large):
        chosen = [row[3:] for row in rows if row[:2] == name.split()]
        rows.append([*name.split(), "all", *map(sum, zip(*chosen, strict=True))])
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *rows])
    for row in rows:
        print(f"{row[0]:7}{row[1]:9}{row[2]:38}{row[3]:10,.0f}{row[4]:10,.0f}", file=sys.stdout)


if __name__ == "__main__":
    main()
