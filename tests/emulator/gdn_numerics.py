"""Error of the chunked gated delta rule in bf16: npu-ops and flash-linear-attention.

python tests/emulator/gdn_numerics.py --fla FLASH_LINEAR_ATTENTION [--tokens 256] [--dim 64 128]

FLASH_LINEAR_ATTENTION is a checkout of fla's repository. Its Triton-Ascend kernels run on the
emulated NPU. npu-ops runs on the emulated NPU and on the CPU. All get the same rounded inputs and
are compared with a recurrence over tokens in fp64. An error is the L2 norm of the difference,
divided by that of the fp64 result. The backward gets gradients of o and of the final state. The
command restarts itself under `npu-ops emulate`.

The exit status is 1 if an error of npu-ops, on either device, exceeds fla's by more than MARGIN.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

import gdn_problem
import torch
import torch.nn.functional as F
import triton  # noqa: F401  (first: the emulated NPU patches it when it is imported)
import upstream_gdn

HEADS, VALUE_HEADS = 2, 4
RESULTS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
MARGIN = 1.05  # equally good kernels differ by the order of their sums


def gates(kind: str, shape) -> torch.Tensor:
    """Return log decays: "near 0", "some" (moderate), "strong", or "A_log" (an untrained layer)."""
    if kind == "A_log":
        A = torch.empty(shape[-1]).uniform_(0.01, 16)
        return -A * F.softplus(torch.randn(shape) + 1)
    return {"near 0": 1e-3, "some": 0.5, "strong": 20.0}[kind] * F.logsigmoid(torch.randn(shape))


def inputs(keys: str, kind: str, tokens: int, dim: int) -> dict[str, torch.Tensor]:
    """Return inputs rounded to bf16, except g and the states; all are stored in fp64."""
    torch.manual_seed(0)
    draw = {"random": torch.randn, "alike": torch.rand}[keys]
    heads, values = (1, tokens, HEADS, dim), (1, tokens, VALUE_HEADS, dim)
    states = (1, VALUE_HEADS, dim, dim)
    wide = {"g": gates(kind, values[:3]), "state": torch.randn(states) / 4}
    wide["dht"] = torch.randn(states) / 4
    narrow = {
        "q": F.normalize(torch.randn(heads), dim=-1),
        "k": F.normalize(draw(heads), dim=-1),
        "v": torch.randn(values),
        "beta": torch.randn(values[:3]).sigmoid(),
        "do": torch.randn(values),
    }
    bf16 = {name: gdn_problem.rounded(x) for name, x in narrow.items()}
    return bf16 | {name: gdn_problem.rounded(x, torch.float32) for name, x in wide.items()}


def run(function, x: dict[str, torch.Tensor], device: str | None) -> list[torch.Tensor]:
    """Return outputs and gradients, as fp64 on the CPU. device: None computes in fp64, too."""
    fp32 = ("g", "state", "dht")
    if device is not None:
        dtypes = {name: torch.float32 if name in fp32 else torch.bfloat16 for name in x}
        x = {name: value.to(device, dtypes[name]) for name, value in x.items()}
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v", "g", "beta", "state")]
    o, state = function(*leaves)
    gradients = torch.autograd.grad((o, state), leaves, (x["do"], x["dht"]))
    return [value.detach().cpu().double() for value in (o, state, *gradients)]


def exact(q, k, v, g, beta, state):
    q, k = (x.repeat_interleave(VALUE_HEADS // HEADS, 2) for x in (q, k))
    return gdn_problem.recurrence(q, k, v, g, beta, state, scale=q.shape[-1] ** -0.5)


def ours(q, k, v, g, beta, state):
    import npu_ops

    return npu_ops.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True
    )


def theirs(q, k, v, g, beta, state):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)


def errors(function, x, device, expected) -> list[float]:
    results = run(function, x, device)
    return [((r - e).norm() / e.norm()).item() for r, e in zip(results, expected, strict=True)]


def compare(keys, kind, tokens, dim, fla: bool) -> bool:
    """Print a row per implementation; return whether npu-ops is nowhere worse than fla."""
    x = inputs(keys, kind, tokens, dim)
    expected = run(exact, x, None)
    rows = {"npu-ops, npu-emulated": errors(ours, x, "npu", expected)}
    rows["npu-ops, cpu"] = errors(ours, x, "cpu", expected)
    if fla:
        rows["fla, npu-emulated"] = errors(theirs, x, "npu", expected)
    for name, row in rows.items():
        numbers = " | ".join(f"{e * 1e3:.2f}" for e in row)
        print(f"| {keys} | {kind} | {dim} | {name} | {numbers} |", flush=True)
    bar = rows.pop("fla, npu-emulated", None)
    return not bar or all(
        row[i] <= bar[i] * MARGIN for row in rows.values() for i in range(len(bar))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fla", type=pathlib.Path, help="flash-linear-attention's checkout")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dim", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--keys", nargs="*", default=["random", "alike"])
    parser.add_argument("--gates", nargs="*", default=["near 0", "some", "strong", "A_log"])
    options = parser.parse_args()
    if os.environ.get("NPU_OPS_EMULATOR") != "1":
        os.environ["NPU_OPS_DISABLE"] = "all"  # or npu-ops would be fla's backend
        command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, *sys.argv]
        return subprocess.run(command, check=False).returncode
    upstream_gdn.import_from(options.fla, None)
    print(f"| keys | gates | K = V | error / 1e-3 of | {' | '.join(RESULTS)} |")
    print("|---" * (4 + len(RESULTS)) + "|")
    good = [
        compare(keys, kind, options.tokens, dim, options.fla is not None)
        for dim in options.dim
        for keys in options.keys
        for kind in options.gates
    ]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
