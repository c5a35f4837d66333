"""Runs transformers' own tests of models that npu-ops accelerates, without it and with it.

    git clone https://github.com/huggingface/transformers
    python tests/adapters/upstream_transformers.py transformers

transformers itself is the clone's, installed once with its requirements to a folder in .cache. No
file of the clone is changed. Tests that need a GPU, a checkpoint or a download are skipped or fail
in both runs, and are listed with their reasons.

The exit status is 1 if a test passes only without npu-ops, or if no call reached npu-ops.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

import counting
import fetching
import pytest
import runs

FILES = tuple(
    f"tests/models/{family}/test_modeling_{family}.py"
    for family in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
)
RUNS = {"without": "all", "with": ""}  # NPU_OPS_DISABLE of each run
# Packages that the tests import beyond those that transformers requires.
MORE = ("datasets", "parameterized", "pillow", "numpy<2.4")
# Tests of FSDP and tensor parallelism need accelerate. Its requirement torch is already installed.
WITHOUT_TORCH = ("accelerate",)


def installed(checkout: pathlib.Path) -> pathlib.Path:
    """Return a folder with the clone's transformers, without torch."""
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    folder = fetching.CACHE / "frameworks" / f"transformers-{commit}"
    if not folder.exists():
        with fetching.whole(folder) as partial:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial)]
            subprocess.run([*command, str(checkout), *MORE], check=True)
            subprocess.run([*command, "--no-deps", *WITHOUT_TORCH], check=True)
    return folder


def run_tests(checkout: pathlib.Path, files: list[str], output: str) -> None:
    record = runs.Record(counting.operators())
    record.count_calls()
    os.chdir(checkout)
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=0"]
    pytest.main([*options, *files], plugins=[record])
    pathlib.Path(output).write_text(json.dumps(record.report()))


def run(name: str, checkout: pathlib.Path, files: list[str]) -> dict:
    settings = {
        "NPU_OPS_DISABLE": RUNS[name], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip
    return runs.run(__file__, name, checkout, files, installed(checkout), settings)


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of transformers")
    parser.add_argument("files", nargs="*", default=FILES, help="of its tests")
    # the run's name, and its report's file
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if options.run:
        return run_tests(checkout, options.files, options.run[1])
    reports = {name: run(name, checkout, options.files) for name in RUNS}
    return runs.compare(reports, options.files)


if __name__ == "__main__":
    sys.exit(main())
