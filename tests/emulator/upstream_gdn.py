"""Runs other projects' Triton-Ascend kernels for Gated Delta Net on the emulated NPU.

python tests/emulator/upstream_gdn.py --fla FLASH_LINEAR_ATTENTION --sgl SGL_KERNEL_NPU

Each argument is a checkout of upstream's repository; none of its files is changed or copied. Every
kernel is called through upstream's own Python function on `npu` tensors. Its result is compared
with the formula in `gdn_problem.py`, in fp64 on the CPU from the same rounded inputs. The chunked
formulas are first compared with the recurrence over tokens. Gradients are PyTorch's gradients of
the formulas. The command restarts itself under `npu-ops emulate`.

The exit status is 1 if a kernel does not compile, does not run or has another result, unless it is
in KNOWN.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.machinery
import io
import os
import pathlib
import subprocess
import sys
import traceback
import types

import gdn_of_fla  # noqa: F401
import gdn_of_sgl  # noqa: F401
import torch
import triton  # noqa: F401  (first: the emulated NPU patches it when it is imported)
from gdn_problem import CASES, Problem, check_formulas

# Relative L2 error. bf16 has 8 bits, so one rounding is 1.7e-3; gradients are rounded several
# times.
TOLERANCE = 1e-2

# Cases that fail, with the reason; all others must pass.
KNOWN = {
    "sgl recompute_w_u_fwd without cu_seqlens": "the kernel reads a name that it then does not set",
    "sgl fused_sigmoid_gating_delta_rule_update_npu, 4 tokens, no state kept": (
        "the kernel reads the state anew for each token, and there it is 0"
    ),
    "sgl causal_conv1d_update_npu, tokens next to each other": (
        "triton-adapter-opt 3.2.0 stops at an assertion (InterleaveOptimization.cpp)"
    ),
}


@dataclasses.dataclass
class Row:
    project: str
    name: str
    kernels: list[str]
    compiles: bool
    runs: bool
    text: str
    right: bool

    def __str__(self):
        yes = ("no", "yes")
        kernels = ", ".join(f"`{k}`" for k in self.kernels) or "none"
        return (
            f"| {self.project} | {self.name} | {kernels} | {yes[self.compiles]} | "
            f"{yes[self.runs]} | {self.text} |"
        )


def error(result, expected):
    result, expected = result.detach().cpu().double(), expected.detach()
    result = result.reshape(expected.shape)
    return ((result - expected).norm() / expected.norm()).item()


def run_case(project, name, function, problem, verbose) -> Row:
    from npu_ops_emulator import triton_driver

    triton_driver.reset_statistics()
    torch.manual_seed(1)
    noise = io.StringIO()
    row = Row(project, name, [], True, True, "", True)
    try:
        with contextlib.redirect_stdout(noise):
            errors = {what: error(*pair) for what, pair in function(problem).items()}
        row.right = all(e < TOLERANCE for e in errors.values())  # False for NaN too
        row.text = ", ".join(f"{what} {e:.1e}" for what, e in errors.items())
        if not row.right:
            row.text = f"WRONG: {row.text}"
    except Exception as failure:
        if verbose:
            traceback.print_exc()
        row.right = row.runs = False
        row.compiles = "cannot be executed here" in str(failure)
        row.text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    row.kernels = sorted(triton_driver.statistics())
    return row


def import_from(fla: pathlib.Path | None, sgl: pathlib.Path | None) -> None:
    if fla:
        sys.path.insert(0, str(fla))
    if sgl:
        # The package's __init__ would load a library of AscendC operators, which is built with
        # CANN.
        package = types.ModuleType("sgl_kernel_npu")
        package.__path__ = [str(sgl / "python" / "sgl_kernel_npu" / "sgl_kernel_npu")]
        package.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel_npu", None, is_package=True)
        sys.modules["sgl_kernel_npu"] = package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fla", type=pathlib.Path, help="flash-linear-attention's checkout")
    parser.add_argument("--sgl", type=pathlib.Path, help="sgl-kernel-npu's checkout")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("-v", "--verbose", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    if os.environ.get("NPU_OPS_EMULATOR") != "1":
        os.environ["NPU_OPS_DISABLE"] = "all"  # keep fla's functions unpatched
        command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, *sys.argv]
        return subprocess.run(command, check=False).returncode
    import_from(options.fla, options.sgl)
    problem = Problem()
    check_formulas(problem)
    print("| project | function | Triton kernels | compiles | runs | relative L2 error |")
    print("|---|---|---|---|---|---|")
    failed = []
    for project, name, function in CASES:
        if getattr(options, project) and options.only in f"{project} {name}":
            row = run_case(project, name, function, problem, options.verbose)
            known = KNOWN.get(f"{project} {name}")
            if known and not row.right:
                row.text = f"{known}; {row.text}"
            if row.right == bool(known):
                failed.append(f"{project} {name}")
            print(row, flush=True)
    if failed:
        print(f"\nnot as expected: {'; '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
