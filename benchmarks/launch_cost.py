"""Measure the host time of a call, i.e. the CPU's work before a kernel runs, in two ways.

    npu-ops emulate -- python benchmarks/launch_cost.py [--rounds 30] [--calls 100]

Times each op that has AscendC kernels, with these and with Triton's, in one process. The time
includes everything from the public function to the runtime's launch: checks, torch's dispatcher,
allocation of outputs, the choice of an implementation, and for Triton the look-up of a compiled
kernel. No kernel runs, so the NPU's time is not included; nor is Triton's own launcher in C++,
which the emulated NPU does not have. Rounds alternate between the two and count processor time of
the whole process. Only the ratio is meaningful: the time is that of this machine and of the
emulated NPU's runtime.

    python benchmarks/launch_cost.py --no-launcher [--rounds 5] [--calls 200]

Times the same without any launcher: on CPU tensors, with an implementation that does nothing. This
is the cost of npu-ops and torch's dispatcher, for the forward, and for forward and backward. A time
is the minimum of the rounds. `dispatcher` is a torch operator with l2norm's schema whose kernel in
Python does nothing. `autograd.Function` is a torch.autograd.Function whose forward only allocates
its result, and whose backward returns its argument.
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
from npu_ops_tools.where import ops

import npu_ops
from npu_ops.core import ascendc, cases, env
from npu_ops.core.registry import Table

BOTH = "triton_ascend", "ascendc"
FIELDS = ("op", "device", "us_triton_ascend", "us_ascendc", "ratio_p50", "ratio_p20", "ratio_p80",
          "rounds", "calls", "git", "repro")  # fmt: skip
HOST_FIELDS = ("call", "device", "us_forward", "us_forward_backward", "rounds", "calls", "git",
               "repro")  # fmt: skip
RESULTS = pathlib.Path(__file__).parent / "results" / "launch" / "npu-emulated.csv"
HOST = RESULTS.with_name("host.csv")
# Empty versions of the functions that csrc/emulator/kernels.cpp looks up in a library of AscendC
# kernels compiled for the CPU.
NOTHING = """
void npu_ops_twin_regions(const char* const*, const unsigned long*, const unsigned long*, long) {}
long npu_ops_twin_launch(void (*)(const void*), long, const void*, int, int) { return 0; }
const char* npu_ops_twin_findings() { return ""; }
"""


def launch_nothing(folder: str) -> None:
    """Let the emulated NPU accept launches without running them."""
    import torch_npu  # noqa: F401
    from npu_ops_emulator import build, headers, triton_launch, twins

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
    """Return a small call of an op on the NPU, without gradients."""
    call = cases.of(op).CALLS[0]
    inputs = {name: value.npu() if isinstance(value, torch.Tensor) else value
              for name, value in call.arguments().items()}  # fmt: skip
    function = getattr(importlib.import_module(f"npu_ops.ops.{op}"), call.function)
    return functools.partial(function, **inputs)


def seconds(run, calls: int) -> float:
    """Return the processor time of one call, in seconds."""
    begin = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begin) / calls


def measure(op: str, rounds: int, calls: int) -> dict:
    run, times = call_of(op), {name: [] for name in BOTH}
    for number in range(rounds + 1):  # the first round compiles
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


def without_launcher() -> dict:
    """Return calls by name: a function of tensors, and the tensors.

    Floating-point tensors are differentiable.
    """
    x, z, weight, gate, heads = map(torch.randn, ((4, 64), (4, 64), (64,), (4, 8), (8,)))
    q, k, v = torch.randn(1, 8, 4, 64), torch.randn(1, 8, 2, 64), torch.randn(1, 8, 2, 64)
    cos, sin = torch.randn(2, 8, 64)
    axes = torch.randn(2, 3, 1, 8, 64)
    places = torch.arange(8)[None]
    qkv = [torch.randn(1, 64, 2, 32) for _ in range(3)]
    decay, beta = -torch.rand(1, 64, 2), torch.rand(1, 64, 2)
    rope = functools.partial(npu_ops.apply_rotary_pos_emb, layout="BSND")
    mrope = functools.partial(npu_ops.apply_multimodal_rotary_pos_emb, layout="BSND",
                              section_layout="interleaved", mrope_section=[12, 10, 10])  # fmt: skip
    return {
        "dispatcher": (dispatched(), [x]),
        "autograd.Function": (Nothing.apply, [x]),
        "l2norm": (npu_ops.l2norm, [x]),
        "bias_dropout_add": (lambda *a: npu_ops.bias_dropout_add(*a, 0.0, True), [x, weight, z]),
        "rms_norm_gated": (npu_ops.rms_norm_gated, [x, weight, z]),
        "gdn_gate": (npu_ops.gdn_gate, [gate, heads, heads.clone(), gate.clone()]),
        "attention": (lambda *a: npu_ops.attention(*a, is_causal=True), [q, k, v]),
        "rope": (lambda q, k: rope(q, k, cos, sin), [q, k]),
        "rope, position_ids": (lambda q, k: rope(q, k, cos, sin, places), [q, k]),
        "mrope": (lambda q, k: mrope(q, k, *axes), [q, k]),
        "chunk_gated_delta_rule": (npu_ops.chunk_gated_delta_rule, [*qkv, decay, beta]),
    }


class Nothing(torch.autograd.Function):
    """Computes nothing: its time is the least that an autograd.Function in Python takes."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def dispatched():
    """Return a torch operator whose Python kernel does nothing."""
    library = torch.library.Library("launch_cost", "DEF")
    library.define("nothing(Tensor x, float eps, ScalarType dtype) -> Tensor")
    library.impl("nothing", lambda x, eps, dtype: x.detach(), "CompositeExplicitAutograd")
    operator = torch.ops.launch_cost.nothing.default
    return lambda x, library=library: operator(x, 1e-6, torch.float32)


def do_nothing() -> None:
    """Replace the CPU's implementation of each op by one that does nothing."""
    for table in Table.tables.values():
        for implementation in table.implementations:
            if implementation.name == "cpu":
                implementation.__dict__["launcher"] = lambda *arguments: None


def least(run, rounds: int, calls: int) -> float:
    """Return the microseconds of a call in the quickest round."""
    return 1e6 * min(seconds(run, calls) for _ in range(rounds))


def backward_of(function, tensors):
    """Return a function that runs a call and its backward, with gradients to all `tensors`."""
    leaves = [x.clone().requires_grad_() for x in tensors]

    def run():
        found = function(*leaves)
        found = found if isinstance(found, tuple) else (found,)
        outputs = [x for x in found if x is not None and x.requires_grad]
        grads = [x.detach() for x in outputs]
        return torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

    return run


def host_rows(rounds: int, calls: int) -> list[dict]:
    do_nothing()
    torch.set_num_threads(1)
    rows = []
    for name, (function, tensors) in without_launcher().items():
        with torch.no_grad():
            forward = least(lambda: function(*tensors), rounds, calls)  # noqa: B023
        row = {"call": name, "device": "cpu", "us_forward": f"{forward:.1f}"}
        if name != "dispatcher":
            both = least(backward_of(function, tensors), rounds, calls)
            row["us_forward_backward"] = f"{both:.1f}"
        print(*row.values(), flush=True)
        rows.append(row | {"rounds": rounds, "calls": calls})
    return rows


def launch_rows(rounds: int, calls: int) -> list[dict]:
    having = [op for op in ops() if "ascendc" in (i.name for i in Table.tables[op].implementations)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        launch_nothing(folder)
        for op in having:
            rows.append(measure(op, rounds, calls))
            shown = " ".join(f"{name} {rows[-1][name]}" for name in FIELDS[2:7])
            print(f"{op:26}{shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-launcher", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    repro = f"--rounds {options.rounds} --calls {options.calls}"
    if options.no_launcher:
        rows, fields, path = host_rows(options.rounds, options.calls), HOST_FIELDS, HOST
        repro = f"python benchmarks/launch_cost.py --no-launcher {repro}"
    else:
        rows, fields, path = launch_rows(options.rounds, options.calls), FIELDS, RESULTS
        repro = f"npu-ops emulate -- python benchmarks/launch_cost.py {repro}"
    path = options.output or path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"git": commit(), "repro": repro} for row in rows)


if __name__ == "__main__":
    print(f"npu_ops {npu_ops.__version__}: no kernel is run")
    main()
