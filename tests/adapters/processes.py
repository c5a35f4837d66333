"""Run checks of a megatron-core release, or a program on several ranks, in other processes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import fetch_megatron

HERE = pathlib.Path(__file__).parent


def environment(*folders, **changes) -> dict[str, str]:
    """Return this process's environment, with `folders` first on PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    path = [*map(str, folders), *([before] if before else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes


@functools.cache
def run_checks(version: str, mode: str) -> dict[str, str | None]:
    """Return the error of each check, or None."""
    autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if mode == "early" else "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"import megatron_checks; megatron_checks.run({mode!r})"],
        env=environment(
            HERE, HERE / "doubles", HERE.parent, fetch_megatron.tree(version), **autoload
        ),
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    stopped = f"not reached: the process ended with {done.returncode}\n{done.stderr[-3000:]}"
    return {"stopped": stopped} | dict(lines)


def ranks(program: str, store: pathlib.Path, number: int, version: str) -> list[dict]:
    """Return each rank's output of a program, with a Megatron release on the path."""
    return run_ranks(program, store, number, fetch_megatron.tree(version))


def run_ranks(program: str, store: pathlib.Path, number: int, *folders) -> list[dict]:
    """Run `PROGRAM STORE RANK RANKS` for each rank; return the last line of JSON of each."""
    path = environment(HERE, *folders, OMP_NUM_THREADS="1")
    command = [sys.executable, str(HERE / program), str(store)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, str(rank), str(number)], env=path, **pipes)
        for rank in range(number)
    ]
    found = []
    for done in started:
        out, err = done.communicate(timeout=300)
        assert done.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found
