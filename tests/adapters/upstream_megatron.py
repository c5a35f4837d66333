"""Runs Megatron-LM's own unit tests on this machine's CPU, without and with npu-ops.

    git clone https://github.com/NVIDIA/Megatron-LM
    python tests/adapters/upstream_megatron.py Megatron-LM

Prints, for each file, what passed and failed on each side and how many calls reached npu-ops. The
tests ask for CUDA: "cuda" is read as "cpu" while they run. A test that fails on both sides fails
for that reason or for a package that is not here; one that fails with npu-ops alone is our fault,
and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import types
import unittest.mock

FILES = (
    "tests/unit_tests/fusions/test_bias_dropout_fusion.py",
    "tests/unit_tests/transformer/test_rope.py",
    "tests/unit_tests/fusions/test_mla_yarn_rope_apply.py",
)
SIDES = {"alone": {"NPU_OPS_DISABLE": "all"}, "with npu-ops": {"NPU_OPS_DISABLE": ""}}
COUNTED = ("bias_dropout_add", "apply_rotary_pos_emb_freqs")
MARK = "npu-ops saw: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of Megatron-LM")
    parser.add_argument("files", nargs="*", default=FILES, help="test files in it")
    options = parser.parse_args()
    broken = 0
    for file in options.files:
        sides = {side: run(options.checkout, file, env) for side, env in SIDES.items()}
        print(file)
        for side, report in sides.items():
            outcomes = collections.Counter(report["tests"].values())
            counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
            print(f"  {side:13}{counts}; calls: {report['calls'] or 'none'}")
        new = differences(*sides.values())
        broken += len(new)
        print("\n".join(f"  BROKEN BY US {test}" for test in new) or "  no test differs")
    return 1 if broken else 0


def differences(alone: dict, ours: dict) -> list[str]:
    """The tests that do worse with us than without."""
    return [
        test
        for test, outcome in alone["tests"].items()
        if outcome == "passed" and ours["tests"].get(test) != "passed"
    ]


def run(checkout: pathlib.Path, file: str, changes: dict) -> dict:
    """Run a file in a process of its own: the outcome of each test, and the calls that we got."""
    path = os.pathsep.join(map(str, (checkout.resolve(), pathlib.Path(__file__).resolve().parent)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "upstream_megatron", file]
        + ["--rootdir", ".", "-c", os.devnull, "-p", "no:cacheprovider", "-q"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} | changes,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines or done.returncode not in (0, 1):
        raise RuntimeError(f"{file} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


# As a plugin of the pytest that runs in the checkout

_calls: collections.Counter = collections.Counter()
_outcomes: dict[str, str] = {}


def pytest_configure(config):
    """Before any of Megatron is imported."""
    without_a_triton_driver()
    read_cuda_as_cpu()
    stand_in_for_utilities()
    count_calls()


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_collectreport(report):
    if report.failed:
        _outcomes[report.nodeid] = "not collected"
        print(report.longreprtext, file=sys.stderr)


def pytest_unconfigure(config):
    print(MARK + json.dumps({"tests": _outcomes, "calls": dict(_calls)}))


def without_a_triton_driver() -> None:
    """Some Triton kernels of Megatron ask for a GPU when they are imported; none runs here."""
    import triton.runtime

    triton.runtime.driver.set_active(unittest.mock.MagicMock())


def read_cuda_as_cpu() -> None:
    """Wherever torch is asked for CUDA."""
    import torch
    from megatron.core.models.gpt import gpt_model  # noqa: F401  it asks the GPU for its name
    from megatron.core.tensor_parallel import random
    from torch.overrides import TorchFunctionMode

    def on_cpu(value):
        cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return "cpu" if cuda else value

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.cuda:
                return args[0]
            args = tuple(map(on_cpu, args))
            return function(*args, **{k: on_cpu(v) for k, v in (kwargs or {}).items()})

    CudaIsCpu().__enter__()
    random.model_parallel_cuda_manual_seed = lambda *args, **kwargs: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.synchronize = torch.cuda.set_device = lambda *args: None


def stand_in_for_utilities() -> None:
    """The tests' helper needs Megatron's training program and NCCL; they use this much of it."""
    package = None
    for name in ("tests", "tests.unit_tests", "tests.unit_tests.test_utilities"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [name.replace(".", os.sep)]
    package.Utils = Utils


class Utils:
    """Process groups of one."""

    @staticmethod
    def initialize_model_parallel(*args, **kwargs):
        import megatron_cpu
        import torch
        from megatron.core import parallel_state

        if not torch.distributed.is_initialized():
            megatron_cpu.start()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(*args, **kwargs)

    @staticmethod
    def destroy_model_parallel():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def count_calls() -> None:
    import npu_ops

    def counted(name, function):
        def call(*args, **kwargs):
            _calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(npu_ops, name, counted(name, getattr(npu_ops, name)))


if __name__ == "__main__":
    sys.exit(main())
