"""Runs flash-linear-attention's own tests with npu-ops as its backend.

python tests/adapters/upstream_fla.py FLASH_LINEAR_ATTENTION [--device npu] [pytest arguments]

The argument is a clone of upstream's repository; none of its files is changed or copied. fla's own
Triton kernels cannot run on the CPU, so a test passes only if npu-ops replaces every kernel that it
needs. With `--device npu` the command restarts itself under `npu-ops emulate`, where fla's kernels
run too. Calls of npu-ops are counted.

The exit status is 1 if a test fails for a reason not in KNOWN, or if none called npu-ops.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import sys

import counting
import pytest
import runs
import torch

FILES = (
    "tests/ops/test_gdn.py",
    "tests/modules/test_l2norm.py",
    "tests/modules/test_conv.py",
    "tests/modules/test_layernorm_gated.py",
)
NO_DRIVER = "0 active drivers"
# Part of a failure's message, and its meaning.
KNOWN = {NO_DRIVER: "needs a kernel of fla's that is not ours"}


def import_fla(checkout: pathlib.Path, device: str) -> None:
    sys.path.insert(0, str(checkout))
    if device == "cpu":
        without_triton_driver()
    import fla.modules
    import fla.ops.gated_delta_rule
    import fla.utils

    fla.utils.device = device
    if device == "cpu":
        fla.utils.device_torch_lib = torch.cpu
        # On other devices the tests leave out grouped heads, which another backend lacks.
        fla.utils.IS_NPU = True


def without_triton_driver() -> None:
    """Set a Triton driver that refuses everything but a request for a benchmarker.

    triton-ascend makes this request when fla is imported, although no kernel runs.
    """
    import triton

    def none(*args, **kwargs):
        raise RuntimeError(NO_DRIVER)

    class NoDriver:
        def __getattr__(self, name):
            none()

        def get_benchmarker(self):
            return none

    triton.runtime.driver.set_active(NoDriver())


class Record:
    """The outcome of each test, and the operators that it called."""

    def __init__(self):
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.calls: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self._test = ""

    def pytest_runtest_logstart(self, nodeid, location):
        self._test = nodeid

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = (report.outcome, reason(report))

    def count_calls(self) -> None:
        counting.on_calls(counting.DELTA_NET, lambda name: self.calls[self._test].update([name]))


def reason(report) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if report.outcome != "failed":
        return ""
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
    first = message.partition("\n")[0]
    return next((meaning for part, meaning in KNOWN.items() if part in message), first[:160])


def show(record: Record) -> int:
    tests = collections.defaultdict(collections.Counter)
    ours = collections.defaultdict(collections.Counter)
    for test, (outcome, _) in record.outcomes.items():
        name = test.partition("[")[0]
        tests[name][outcome] += 1
        tests[name]["reached"] += bool(record.calls[test])
        ours[name].update(record.calls[test])
    print("\n| test | passed | failed | skipped | reached npu-ops | calls |")
    print("|---|---|---|---|---|---|")
    for name, counts in tests.items():
        numbers = " | ".join(str(counts[k]) for k in ("passed", "failed", "skipped", "reached"))
        calls = ", ".join(f"{op} {n}" for op, n in sorted(ours[name].items())) or "none"
        print(f"| {name.removeprefix('tests/')} | {numbers} | {calls} |")
    why = collections.Counter(
        (outcome, text) for outcome, text in record.outcomes.values() if outcome != "passed"
    )
    print()
    for (outcome, text), number in why.most_common():
        print(f"{number} {outcome}: {text}")
    unknown = any(o == "failed" and t not in KNOWN.values() for o, t in record.outcomes.values())
    return int(unknown or not record.calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of flash-linear-attention")
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    options, more = parser.parse_known_args()
    checkout = options.checkout.resolve()
    if options.device == "npu":
        runs.on_emulated_npu()
    import_fla(checkout, options.device)
    record = Record()
    record.count_calls()
    files = [] if any(arg.startswith("tests/") for arg in more) else FILES
    os.chdir(checkout)
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *files, *more], plugins=[record])
    return show(record)


if __name__ == "__main__":
    sys.exit(main())
