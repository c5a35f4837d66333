"""Run `npu-ops model` on npu-ops' calls in CALLS, and compare with the time of memory traffic.

    python benchmarks/model_ops.py [NAME ...]

Writes the rows of the named calls (default: all, which takes an hour) into
results/npu-model/ops.csv, and prints them. All times are predictions, none was measured:
docs/npu-model.md.
"""

from __future__ import annotations

import csv
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from npu_ops_tools import model

import npu_ops

SOC = "Ascend910B2"  # 24 cube and 48 vector cores
RESULTS = pathlib.Path(__file__).parent / "results" / "npu-model" / "ops.csv"
FIELDS = (
    "call", "kernel", "us", "likely_us", "low_us", "high_us", "limit_us", "of_limit", "bottleneck",
    "loaded_mb", "stored_mb", "workspace_mb", "programs", "balance", "soc", "label", "git",
)  # fmt: skip


def delta_rule(
    batch: int, tokens: int, heads: int, value_heads: int, sequences: int = 0, backward=False
) -> Callable[[], list]:
    """Return the launches of a forward or a backward.

    sequences: 0, or the number of sequences of 512 to 1536 tokens that the tokens are cut into.
    """

    def launches():
        q, k = (torch.empty(batch, tokens, heads, 128, dtype=torch.bfloat16) for _ in range(2))
        v = torch.empty(batch, tokens, value_heads, 128, dtype=torch.bfloat16)
        g, beta = (torch.zeros(batch, tokens, value_heads) for _ in range(2))
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "output_final_state": True}
        if sequences:
            mean = tokens // sequences
            middle = torch.arange(1, sequences) * mean
            ends = middle + (torch.arange(1, sequences) * 37 % mean - mean // 2) // 2
            inputs["cu_seqlens"] = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([tokens])])
        forward = model.of_call("", SOC, npu_ops.chunk_gated_delta_rule, inputs)
        if not backward:
            return forward
        wrt = ("q", "k", "v", "g", "beta")
        both = model.of_call("", SOC, npu_ops.chunk_gated_delta_rule, inputs, wrt)
        return both[len(forward) :]

    return launches


def decode(batch: int, heads: int, value_heads: int) -> Callable[[], list]:
    def launches():
        width = (2 * heads + value_heads) * 128
        inputs = {
            "qkv": torch.zeros(batch, width).bfloat16(),
            "a": torch.zeros(batch, value_heads).bfloat16(),
            "b": torch.zeros(batch, value_heads).bfloat16(),
            "A_log": torch.zeros(value_heads),
            "dt_bias": torch.zeros(value_heads),
            "state": torch.zeros(batch, value_heads, 128, 128),
            "state_indices": torch.arange(batch, dtype=torch.int32),
            "state_v_first": True,
        }
        return model.of_call("", SOC, npu_ops.gated_delta_rule_update, inputs)

    return launches


def decode_by_chunks(batch: int, heads: int, value_heads: int) -> Callable[[], list]:
    """Return the launches of one token per sequence; each unfinished chunk is nearly full."""

    def launches():
        q, k = (torch.zeros(1, batch, heads, 128).bfloat16() for _ in range(2))
        rows = npu_ops.unfinished_rows(128, 128)
        state = torch.zeros(batch, value_heads, 128 + rows, 128)
        state[:, :, 128 + 64 :].flatten(2)[:, :, 64 * 130] = 63
        inputs = {
            "q": q,
            "k": k,
            "v": torch.zeros(1, batch, value_heads, 128).bfloat16(),
            "g": torch.zeros(1, batch, value_heads),
            "beta": torch.zeros(1, batch, value_heads),
            "initial_state": state,
            "output_final_state": True,
            "state_v_first": True,
            "cu_seqlens": torch.arange(batch + 1),
            "carry_unfinished": True,
        }
        return model.of_call("", SOC, npu_ops.chunk_gated_delta_rule, inputs)

    return launches


def step_of_convolution(batch: int, channels: int) -> Callable[[], list]:
    def launches():
        inputs = {
            "x": torch.zeros(batch, channels).bfloat16(),
            "conv_state": torch.zeros(batch, 3, channels).bfloat16().transpose(1, 2),
            "weight": torch.zeros(channels, 4).bfloat16(),
            "activation": "silu",
            "conv_state_indices": torch.arange(batch, dtype=torch.int32),
        }
        return model.of_call("", SOC, npu_ops.causal_conv1d_update, inputs)

    return launches


def convolution(taps: int) -> Callable[[], list]:
    """Return the launches for a prompt with all channels of Qwen3-Next; models have 4 taps."""

    def launches():
        inputs = {
            "x": torch.empty(1, 4096, 8192, dtype=torch.bfloat16, requires_grad=True),
            "weight": torch.empty(8192, taps, dtype=torch.bfloat16, requires_grad=True),
            "activation": "silu",
        }
        return model.of_call("", SOC, npu_ops.causal_conv1d, inputs)

    return launches


def case(op: str, name: str, tokens: int | None = None) -> Callable[[], list]:
    return lambda: model.of_case(op, name, torch.bfloat16, SOC, tokens)


# Batch, tokens, heads and value heads of the chunked delta rule.
CHUNKED = [(1, 1024, 16, 32), (8, 1096, 4, 4), (1, 32768, 4, 4), (1, 11264, 16, 32)]
PACKED = "chunk_gated_delta_rule HK=16 HV=32 T=65536 in 64 sequences"


def chunked(batch: int, tokens: int, heads: int, value_heads: int) -> str:
    return f"chunk_gated_delta_rule B={batch} HK={heads} HV={value_heads} T={tokens}"


CALLS = {
    "rope Qwen3-VL-8B T=512": case("rope", "qwen3-vl-8b-tp1-t512"),
    "rope Qwen3-VL-8B T=8192": case("rope", "qwen3-vl-8b-tp1-t512", 8192),
    "mrope Qwen3-VL-8B T=512": case("mrope", "qwen3-vl-8b-tp1-t512"),
    "mrope Qwen3-VL-8B T=8192": case("mrope", "qwen3-vl-8b-tp1-t8192"),
    "qk_norm_rope Qwen3-8B T=8192": case("qk_norm_rope", "qwen3-8b-t8192"),
    "qk_norm_rope Qwen3-VL-8B T=8192": case("qk_norm_rope", "qwen3-vl-8b-t8192"),
    "qk_norm_rope Qwen3.5-9B T=8192": case("qk_norm_rope", "qwen3.5-9b-t8192"),
    "bias_dropout_add Qwen3-VL-8B T=512": case("bias_dropout_add", "qwen3-vl-8b-decode-512"),
    "bias_dropout_add Qwen3-VL-8B T=8192": case("bias_dropout_add", "qwen3-vl-8b-train-8192-tp1"),
    "l2norm Qwen3-Next T=8192": case("l2norm", "qwen3-next-tp1-t8192"),
    "rms_norm_gated Qwen3-Next T=8192": case("rms_norm_gated", "qwen3-next-tp1-t8192"),
    "rms_norm Qwen3-8B T=8192": case("rms_norm", "qwen3-8b-t8192"),
    "rms_norm with a residual, Qwen3-8B T=8192": case("rms_norm", "qwen3-8b-add-t8192"),
    "linear Qwen3-8B T=4096": case("linear", "qwen3-8b-o-t4096"),
    "swiglu Qwen3-8B T=64": case("swiglu", "qwen3-8b-t64"),
    "swiglu Qwen3-8B T=8192": case("swiglu", "qwen3-8b-t8192"),
    "gdn_gate Qwen3-Next T=8192": case("gdn_gate", "qwen3-next-tp1-t8192"),
    "causal_conv1d Qwen3-Next T=4096": convolution(4),
    "causal_conv1d Qwen3-Next T=4096, 5 taps": convolution(5),
    "causal_conv1d Qwen3-Next T=4096, 8 taps": convolution(8),
    "causal_conv1d_qkv Qwen3-Next T=4096": case("causal_conv1d_qkv", "qwen3-next-t4096"),
    "causal_conv1d_update Qwen3-Next B=32": case("causal_conv1d_update", "qwen3-next-b32"),
    "causal_conv1d_update 1536 channels B=256": step_of_convolution(256, 1536),
    "gated_delta_rule_update B=1 HV=32": decode(1, 16, 32),
    "gated_delta_rule_update B=1 HV=4": decode(1, 4, 4),
    "gated_delta_rule_update B=1 HV=48": decode(1, 16, 48),
    "gated_delta_rule_update B=16 HV=32": decode(16, 16, 32),
    "gated_delta_rule_update B=64 HV=32": decode(64, 16, 32),
    "gated_delta_rule_update B=256 HV=4": decode(256, 4, 4),
    "gated_delta_rule_update B=256 HV=32": decode(256, 16, 32),
    **{
        f"carried states B={batch} HV=32, a token": decode_by_chunks(batch, 16, 32)
        for batch in (1, 4, 16, 64)
    },
    **{chunked(*sizes): delta_rule(*sizes) for sizes in CHUNKED},
    "chunk_kda Kimi-Linear-48B T=4096": case("chunk_kda", "kimi-linear-48b-tp1-t4096"),
    **{chunked(*sizes) + ", backward": delta_rule(*sizes, backward=True) for sizes in CHUNKED},
    PACKED: delta_rule(1, 65536, 16, 32, sequences=64),
}


def rows(name: str) -> Iterator[dict]:
    """Yield a row for each kernel. Equal rows are dropped: rope has one kernel for both passes."""
    seen = set()
    for said in model.predict_all(CALLS[name](), SOC):
        row = {"call": name} | row_of(said)
        if tuple(row.values()) not in seen:
            seen.add(tuple(row.values()))
            yield row


def row_of(said: model.Prediction) -> dict:
    """Return a prediction as a row of the table."""
    row = {"kernel": said.kernel, "soc": said.soc, "label": said.label}
    times = ("us", "likely_us", "low_us", "high_us", "limit_us")
    row |= {each: f"{getattr(said, each):.3g}" for each in times}
    row |= {each: f"{getattr(said, each):.2f}" for each in ("of_limit", "balance")}
    for each in ("loaded", "stored", "workspace"):
        row[f"{each}_mb"] = f"{getattr(said, each) / 1e6:.3f}"
    return row | {"bottleneck": said.bottleneck, "programs": said.programs, "git": _commit()}


def _commit() -> str:
    """Return the commit, with "-dirty" if kernels or model have changed; the table may differ."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", "npu_ops", "python").returncode
    return git("describe", "--always").stdout.strip() + ("-dirty" if changed else "")


def main(names: list[str]) -> None:
    for name in names or CALLS:
        found = list(rows(name))
        kept = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        kept = [row for row in kept if row["call"] != name] + found
        kept.sort(key=lambda row: list(CALLS).index(row["call"]))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        for row in found:
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
