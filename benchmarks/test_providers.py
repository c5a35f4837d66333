"""Time every provider of every benchmark under pytest-benchmark: `pytest benchmarks/ --op rope`.

`npu-ops bench` times the same providers alternately; this command supports --benchmark-json and
--benchmark-compare.
"""

import torch


def test_provider(benchmark, work, provider):
    benchmark.group = f"{work.benchmark.op}: {work.benchmark.name}"
    benchmark.param = provider
    benchmark.extra_info.update(bytes=work.moved, flop=work.flop)
    call = work.calls[provider]
    call()  # may compile
    outputs = benchmark(call)
    assert all(isinstance(out, torch.Tensor) and out.isfinite().all() for out in outputs)
