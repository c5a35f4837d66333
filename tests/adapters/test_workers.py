"""Processes that a trainer starts: each registers npu-ops by itself, however it was started."""

from __future__ import annotations

import json
import subprocess
import sys

import fetch_frameworks
import pytest
from processes import environment

# A worker's code. It imports npu-ops only after transformers, and its parent process never does:
# the patches that it finds were registered automatically.
WORKER = """
def worker():
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

    name = qwen3_vl.apply_rotary_pos_emb.__name__
    import os
    import npu_ops, npu_ops_adapters
    states = {row.sentence for row in npu_ops_adapters.verify()}
    return name, sorted(states), npu_ops.is_npu(), os.getpid()
"""

SPAWNED = f"""{WORKER}
def child(queue):
    queue.put(worker())

if __name__ == "__main__":
    import json, multiprocessing, os
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=300)
    process.join()
    print(json.dumps([*found, os.getpid()]))
"""

RAY = f"""{WORKER}
import json, os, ray
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)

@ray.remote
class Trainer:
    def step(self):
        return worker()

print(json.dumps([*ray.get(Trainer.remote().step.remote(), timeout=300), os.getpid()]))
ray.shutdown()
"""


@pytest.mark.parametrize(
    "program, folders",
    [(SPAWNED, ()), (RAY, ("ray-2.55.1",))],
    ids=["a spawned process", "an actor of Ray"],
)
def test_it_is_registered_in(program, folders, tmp_path):
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env=environment(*map(fetch_frameworks.tree, folders), RAY_USAGE_STATS_ENABLED="0"),
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    name, states, has_npu, worker, starter = json.loads(lines[-1])
    assert name == "npu_ops_function" and states == ["applied"] and has_npu is False
    assert worker != starter
