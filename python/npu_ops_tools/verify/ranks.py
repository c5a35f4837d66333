"""Checks two devices of this machine: collectives, and the same results on both.

`python -m npu_ops_tools.verify.ranks DEVICE RANK FILE` runs one of the two processes.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from torch import distributed

import npu_ops
from npu_ops.core import collective, preferences
from npu_ops.core.compare import error_ratio
from npu_ops_tools.verify import checks, jobs
from npu_ops_tools.where import ops

BACKENDS = {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}
RANKS = 2


def run(device: str, modules: list[str], variables: dict[str, str], limit: float) -> dict:
    """Run two processes, each with a device; return their result in the form of `Worker.do`."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "npu_ops_tools.verify.ranks", device]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(pathlib.Path(folder, "store")), *modules],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | variables,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        said = [_said(process, start + limit - time.monotonic()) for process in processes]
    wrong = [f"rank {rank}: {sentence}" for rank, found in enumerate(said) for sentence in found]
    verdict = checks.WRONG if wrong else checks.RIGHT
    seconds = time.monotonic() - start
    return {"verdict": verdict, "why": "; ".join(wrong), "seconds": seconds}


def _said(process: subprocess.Popen, limit: float) -> list[str]:
    """Return the problems that a rank reports."""
    try:
        out, words = process.communicate(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ["hung"]
    lines = [line for line in out.splitlines() if line.startswith('{"wrong"')]
    if process.returncode or not lines:
        return [" / ".join(line.strip() for line in words.splitlines()[-2:]) or "crashed"]
    return json.loads(lines[-1])["wrong"]


def main() -> None:
    device, rank, store, *modules = sys.argv[1:]
    for module in modules:
        __import__(module)
    kind = jobs.torch_device(device)
    here = torch.device(kind, int(rank) if kind != "cpu" else 0)
    if kind != "cpu":
        getattr(torch, kind).set_device(here)
    distributed.init_process_group(
        BACKENDS[kind], init_method=f"file://{store}", rank=int(rank), world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    wrong = list(_other_tables(kind))
    # With different tables, ops would raise an error on one rank, and the other would wait.
    if not _on_any(bool(wrong), here):
        wrong = [*_gathered(here), *_split(here), *_alike(here)]
    print(json.dumps({"wrong": wrong}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def _other_tables(kind: str):
    """Yield an error if the ranks have different tables of `npu-ops tune`."""
    try:
        preferences.settle(kind)
    except RuntimeError as error:
        yield str(error)


def _on_any(flag: bool, device: torch.device) -> bool:
    count = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    distributed.all_reduce(count)
    return bool(count.item())


def _gathered(device: torch.device):
    """Check the values of an all_gather, and the sum of gradients."""
    rank = distributed.get_rank()
    x = torch.full((3,), float(rank + 1), dtype=torch.float32, device=device, requires_grad=True)
    out = collective.all_gather(x, distributed.group.WORLD)
    (out * (rank + 1)).sum().backward()
    if out[:, 0].tolist() != [1.0, 2.0]:
        yield f"all_gather: got {out[:, 0].tolist()}, needs [1.0, 2.0]"
    if x.grad.tolist() != [3.0] * 3:
        yield f"all_gather: the gradient is {x.grad.tolist()}, needs 3 everywhere"


def _split(device: torch.device):
    """Check that a sequence split over the ranks gives the result of one rank."""
    rank, tokens = distributed.get_rank(), 128
    draw = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(1, tokens, 32, generator=draw, dtype=torch.float32, device="cpu").to(device)
    weight = torch.ones(32, 4, dtype=torch.float32, device=device)
    part = slice(rank * tokens // RANKS, (rank + 1) * tokens // RANKS)
    whole, _ = npu_ops.causal_conv1d(x, weight)
    own, _ = npu_ops.causal_conv1d(x[:, part], weight, cp_group=distributed.group.WORLD)
    error = error_ratio(own.cpu(), whole[:, part].cpu())
    if not error < 1e-5:
        yield f"causal_conv1d over {RANKS} ranks: error ratio {error:.2g} against one rank"


def _alike(device: torch.device):
    """Check that every op gives both ranks the same bits."""
    for op in ops():
        case = jobs.representative(op)[0]
        job = jobs.Job("check", op, "", case.name, "bfloat16", tokens=jobs.few(case))
        subject = checks.Subject(job, device)
        with checks.one_mask():
            outcome = subject.outcome(subject.inputs())
        digest = hashlib.sha256()
        for x in outcome:
            digest.update(checks.bits(x).numpy())
        mine = torch.tensor([int.from_bytes(digest.digest()[:4], "big")], dtype=torch.int64)
        both = [torch.empty_like(mine.to(device)) for _ in range(RANKS)]
        distributed.all_gather(both, mine.to(device))
        if len({int(x) for x in both}) > 1:
            yield f"{op}: results differ from the other rank"


if __name__ == "__main__":
    main()
