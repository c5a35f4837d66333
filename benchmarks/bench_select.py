"""What choosing an implementation costs, beside a cheap call of torch: an add of one element."""

import torch
from npu_ops_tools.bench import Benchmark

from npu_ops.core.registry import Table
from npu_ops.ops.rope import cases


def benchmarks(device, quick):
    made = cases.model_case("qwen3-vl-8b", 1, 1).inputs(torch.bfloat16, device)
    q, k, cos, sin = made["q"], made["k"], made["cos"][None], made["sin"][None]
    arguments = (q, k, cos, sin, None, "TND", "half", False, 128, q, k)
    table, one = Table.tables["rope"], torch.ones(1, device=device)
    run = {
        "select": lambda: table.select(*arguments),
        "torch_add": lambda: torch.add(one, one),
    }
    yield Benchmark(
        "select", "rope decode", "eager", torch.bfloat16, {"q": list(q.shape)}, run, "torch_add", 0
    )
