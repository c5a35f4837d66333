"""Times a call: on the device with a cold cache, and on the host."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import torch

from npu_ops.core import preferences
from npu_ops.core.registry import Table, launched_by
from npu_ops_tools.verify import guards
from npu_ops_tools.verify.checks import Subject, tables

# Bytes that evict tensors from a cache: on a device, its last-level cache; on a CPU, only the
# core's own cache, because the interpreter uses the others.
FLUSHED = {"cpu": 4 << 20, "npu": 256 << 20, "cuda": 256 << 20}
SECONDS, FEWEST, MOST = 0.5, 5, 100  # seconds and runs of one measurement


def measure(subject: Subject) -> dict:
    """Return times in us: {"forward": {"p20", "p50", "p80", "runs"}, "backward": ..., "host"}."""
    found = {}
    with subject.forced():
        inputs = subject.inputs()
        found["forward"] = timed(lambda: _forward(subject, inputs), subject.device)
        if subject.wrt:
            graph = _graph(subject)
            backward = functools.partial(torch.autograd.grad, *graph, retain_graph=True)
            found["backward"] = timed(backward, subject.device)
        found["host"] = host_us(lambda: _forward(subject, inputs), subject.device)
    return found


def classes(subject: Subject) -> dict[str, dict]:
    """Return the class of the call, by operator: the op's forward and its backward.

    `npu-ops tune` prefers an implementation per class: dtype, last dimension and bits of the size.
    """
    found = {}

    def note(table: Table, args: tuple) -> None:
        (dtype, width), bits = preferences.class_of(args)
        name = str(dtype).removeprefix("torch.")
        found.setdefault(table.op, {"dtype": name, "width": width, "bits": bits})

    with guards.noted(note):
        subject.results()
    return {op: found[op] for op in tables(subject.job.op) if op in found}


def _forward(subject: Subject, inputs: dict):
    with torch.no_grad():
        return subject.function(**inputs)


def _graph(subject: Subject) -> tuple[list, list, list]:
    """Return differentiable outputs, inputs that need a gradient, and gradients of the outputs."""
    inputs = subject.inputs()
    leaves = [inputs[n].requires_grad_() for n in subject.wrt if inputs.get(n) is not None]
    outputs = _differentiable(subject.function(**inputs))
    return outputs, leaves, [torch.ones_like(out) for out in outputs]


def _differentiable(outputs) -> list[torch.Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out for out in outputs if out is not None and out.requires_grad]


def timed(run: Callable[[], object], device: torch.device) -> dict:
    """Return percentiles in us.

    Before each run, other memory is written to evict the tensors from the cache. On a device that
    also lets the host run ahead.
    """
    for _ in range(3):
        run()
    flush = torch.empty(FLUSHED[device.type], dtype=torch.uint8, device=device)
    once = _once_on_cpu if device.type == "cpu" else _once_on_device
    taken, start = [], time.perf_counter()
    while len(taken) < FEWEST or (time.perf_counter() - start < SECONDS and len(taken) < MOST):
        flush.zero_()
        taken.append(once(run, device))
    ordered = sorted(taken)
    found = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (20, 50, 80)}
    return found | {"runs": len(ordered)}


def _once_on_cpu(run, device) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _once_on_device(run, device) -> float:
    backend = getattr(torch, device.type)
    begin, end = (backend.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def host_us(run: Callable[[], object], device: torch.device, calls: int = 50) -> float:
    """Return the host time until a call returns, in us, the fastest of a few.

    On a CPU, where the call includes the computation, the kernel is skipped.
    """
    without = _no_kernels() if device.type == "cpu" else contextlib.nullcontext()
    best = float("inf")
    with without:
        for _ in range(5):
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                run()
            best = min(best, (time.perf_counter() - start) / calls)
    _synchronize(device)
    return best * 1e6


def _no_kernels() -> contextlib.AbstractContextManager[None]:
    """In a block, choose an implementation for each call but launch nothing: only host time
    remains."""
    return launched_by(lambda table, chosen, args: None)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def predicted(subject: Subject, soc: str) -> dict:
    """Return npu-model's prediction of the Triton kernels on `soc`.

    The result is {"forward": {"us", "low", "high"}}, or {"why_not": a sentence}.
    """
    try:
        from npu_ops_tools.model import of_call, predict_all
        from npu_ops_tools.model.prediction import totals

        inputs = subject.case.inputs(subject.job.torch_dtype)
        launches = of_call(subject.job.case, soc, subject.function, inputs)
        total = totals(list(predict_all(launches, soc)))
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        return {"why_not": str(error).partition("\n")[0]}
    if not total:
        return {"why_not": "no Triton kernel is launched"}
    return {"forward": {"us": total["us"], "low": total["low_us"], "high": total["high_us"]}}
