"""Benchmark rows with invented numbers, for tests of code that reads rows."""

import dataclasses

from npu_ops_tools.bench.rows import Row
from npu_ops_tools.bench.sweep import MODES

SIZES = (1, 16, 128, 1024, 8192, 32768)
SHAPE = "qwen3.5-9b = qwen3-next-80b-a3b = qwen3.5-35b-a3b tp1"
# Time of each provider, relative to npu-ops.
PEERS = {"npu-ops": 1.0, "transformers": 6.0, "torch.compile": 2.5, "Megatron": 4.0}


def row(**changes) -> Row:
    """Return a row of l2norm at 128 tokens, by default stable at 2 ms."""
    ms = changes.pop("ms", 2.0)
    made = {
        "op": "l2norm", "shape": SHAPE, "size": 128, "unit": "tokens", "mode": "forward",
        "dtype": "bfloat16", "provider": "npu-ops", "implementation": "", "state": "stable",
        "note": "", "ms_p20": 0.96 * ms, "ms_p50": ms, "ms_p80": 1.15 * ms, "ms_low": 0.98 * ms,
        "ms_high": 1.02 * ms, "runs": 12, "calls": 3, "bytes": 2**20, "flop": None,
        "copy_gbps": 11.0, "matmul_tflops": None, "peak_mb": 1.5, "error": 1.7e-3,
        "error_against": "reference in fp64", "device": "cpu", "machine": "A Processor",
        "threads": 2, "versions": "torch 2.13.0", "commit": "0123456789ab", "dirty": False,
        "timestamp": "2026-11-22T10:00:00+00:00", "command": "npu-ops bench l2norm",
    }  # fmt: skip
    return Row(**made | changes)


def sweep(op="l2norm", device="cpu", machine="A Processor", flop=None) -> list[Row]:
    """Return rows of one shape at all sizes and modes, and of others at one size.

    Megatron's smallest size is unstable.
    """
    places = [(SHAPE, size, mode, "bfloat16") for size in SIZES for mode in MODES]
    places += [(SHAPE, 1024, mode, dtype) for mode in MODES for dtype in ("float32", "float16")]
    others = (SHAPE.replace("tp1", "tp4"), SHAPE.replace("tp1", "tp8"), "qwen3-vl-8b tp1")
    places += [(shape, 1024, mode, "bfloat16") for shape in others for mode in MODES]
    return [
        row(
            op=op, device=device, machine=machine, shape=shape, size=size, mode=mode, dtype=dtype,
            provider=provider, ms=times * (0.004 + 2e-4 * size * (1 + MODES.index(mode))),
            bytes=4096 * size, flop=flop and flop * size, matmul_tflops=flop and 0.1,
            state="unstable" if size == 1 and provider == "Megatron" else "stable",
            peak_mb=0.01 * size, error=1e-3 * (1 + len(provider) / 40),
        )
        for shape, size, mode, dtype in places
        for provider, times in PEERS.items()
    ]  # fmt: skip


def absent(**changes) -> Row:
    """Return the row of a provider that could not be timed."""
    numbers = {f.name: None for f in dataclasses.fields(Row) if "None" in str(f.type)}
    said = {"state": "absent", "note": "its kernels run on GPUs alone", "provider": "flash-attn"}
    return dataclasses.replace(
        row(), **numbers | said | {"size": 0, "shape": "", "mode": "", "dtype": ""} | changes
    )
