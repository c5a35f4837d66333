"""Host time of a call of each op with AscendC kernels, by those and by Triton's, of one process.

    npu-ops emulate -- python benchmarks/launch_cost.py [--rounds 30] [--calls 100]

From the public function to the runtime's launch: checks, torch's dispatcher, allocation of outputs,
the choice of an implementation, and of Triton the look-up of a compiled kernel. No kernel is run,
so what the NPU would do is not in it; nor is Triton's own launcher in C++, which the emulated NPU
does not have. Rounds take turns between the two, in processor time of the whole process. What is to
be read is the ratio: the time is that of this machine and of the emulated NPU's runtime.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import torch_npu  # noqa: F401
from npu_ops_emulator import build, headers, triton_launch, twins
from npu_ops_tools.where import ops

import npu_ops
from npu_ops.core import ascendc, cases, env
from npu_ops.core.registry import Table

BOTH = "triton_ascend", "ascendc"
FIELDS = ("op", "device", "us_triton_ascend", "us_ascendc", "ratio_p50", "ratio_p20", "ratio_p80",
          "rounds", "calls", "git", "repro")  # fmt: skip
RESULTS = pathlib.Path(__file__).parent / "results" / "launch" / "npu-emulated.csv"
# What the emulated runtime asks of a library of twins (csrc/emulator/kernels.cpp).
NOTHING = """
void npu_ops_twin_regions(const char* const*, const unsigned long*, const unsigned long*, long) {}
long npu_ops_twin_launch(void (*)(const void*), long, const void*, int, int) { return 0; }
const char* npu_ops_twin_findings() { return ""; }
"""


def launch_nothing(folder: str) -> None:
    """Let launches be taken and not run."""
    names = [name for path in headers.kernel_sources().glob("*/*_ascendc.cpp")
             for name in twins._KERNEL.findall(path.read_text())]  # fmt: skip
    source, library = pathlib.Path(folder) / "nothing.cpp", f"{folder}/nothing.so"
    kernels = "".join(f"void {name}__twin(const void*) {{}}\n" for name in names)
    source.write_text(f'extern "C" {{{NOTHING}{kernels}}}')
    subprocess.run([*build.compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    target = ascendc.target

    @functools.cache
    def of_nothing(op, device):
        return library, *target(op, device)[1:]

    ascendc.target = of_nothing
    triton_launch.Launcher.__call__ = lambda self, *arguments: None


def call_of(op: str):
    """A small call of an op on the NPU, without gradients."""
    call = cases.of(op).CALLS[0]
    inputs = {name: value.npu() if isinstance(value, torch.Tensor) else value
              for name, value in call.arguments().items()}  # fmt: skip
    function = getattr(importlib.import_module(f"npu_ops.ops.{op}"), call.function)
    return functools.partial(function, **inputs)


def seconds(run, calls: int) -> float:
    """Of the processor, for a call."""
    begin = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begin) / calls


def measure(op: str, rounds: int, calls: int) -> dict:
    run, times = call_of(op), {name: [] for name in BOTH}
    for number in range(rounds + 1):  # the first compiles
        for name in BOTH if number % 2 else BOTH[::-1]:
            with env.override(impl={op: name}):
                times[name].append(seconds(run, calls))
    times = {name: values[1:] for name, values in times.items()}
    ratios = [a / b for b, a in zip(*times.values(), strict=True)]
    p20, _, _, p80 = (f"{cut:.3f}" for cut in statistics.quantiles(ratios, n=5))
    median = {f"us_{name}": f"{statistics.median(x) * 1e6:.1f}" for name, x in times.items()}
    return {
        "op": op, "device": "npu-emulated", **median, "ratio_p20": p20, "ratio_p80": p80,
        "ratio_p50": f"{statistics.median(ratios):.3f}", "rounds": rounds, "calls": calls,
    }  # fmt: skip


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.check_output(command, cwd=pathlib.Path(__file__).parent, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    git, rows = commit(), []
    repro = (f"npu-ops emulate -- python benchmarks/launch_cost.py --rounds {options.rounds} "
             f"--calls {options.calls}")  # fmt: skip
    having = [op for op in ops() if "ascendc" in (i.name for i in Table.tables[op].implementations)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        launch_nothing(folder)
        for op in having:
            rows.append(measure(op, options.rounds, options.calls) | {"git": git, "repro": repro})
            shown = " ".join(f"{name} {rows[-1][name]}" for name in FIELDS[2:7])
            print(f"{op:26}{shown}", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    print(f"npu_ops {npu_ops.__version__}: no kernel is run")
    main()
