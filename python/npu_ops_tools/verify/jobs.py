"""Lists the jobs of a verification: each is an implementation with a case to check or to time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from npu_ops.core import cases
from npu_ops.core.models import MODELS
from npu_ops.core.registry import Table
from npu_ops_tools.where import ops

DEVICES = ("cpu", "npu", "npu-emulated", "cuda")
# Models whose shapes are timed: in a quick run, the first one that has the op; in a full run, all.
TIMED_MODELS = ("qwen3.5-9b", "qwen3-vl-8b", "qwen3.5-35b-a3b")
DTYPES = ("bfloat16", "float32", "float16")
MICROBENCHMARKS = "microbenchmarks"  # a job that measures the constants of `npu-ops model`
OF_AN_OP = ("check", "time")  # kinds of jobs that belong to an op
FEW = 64  # tokens to use for a large case whose size does not matter


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of an op by one implementation, to check or to time.

    kind: "check", for a case of the op; "time", for `case` of `model`; or MICROBENCHMARKS, for no
    op.
    tokens: overrides the case's own; for a model's case, its number of tokens.
    """

    kind: str
    op: str
    implementation: str
    case: str
    dtype: str
    model: str = ""
    tokens: int = 0

    @property
    def name(self) -> str:
        if self.kind == MICROBENCHMARKS:
            return self.kind
        shape = f"{self.model} {self.case}".lstrip()
        shape += f" of {self.tokens} tokens" if self.tokens else ""
        return f"{self.op} by {self.implementation}, {shape} in {self.dtype}"

    def find(self) -> cases.Case:
        """Return the job's case."""
        module = cases.of(self.op)
        known = module.of_model(MODELS[self.model], self.tokens) if self.model else module.CASES
        found = next(case for case in known if case.name == self.case)
        if self.model or not self.tokens:
            return found
        return dataclasses.replace(found, tokens=self.tokens, large=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def plan(device: str, full: bool, only: list[str]) -> dict[str, list[Job]]:
    """Return the jobs of each op, the most informative first, because time may run out.

    device: one of DEVICES.

    Raises:
        ValueError: there is no such device or op.
    """
    if device not in DEVICES:
        raise ValueError(f"device: got {device!r}, needs one of {', '.join(DEVICES)}")
    unknown = set(only) - set(ops())
    if unknown:
        raise ValueError(
            f"only: got {', '.join(sorted(unknown))}, needs some of {', '.join(ops())}"
        )
    return {op: list(_of_op(op, device, full)) for op in ops() if not only or op in only}


def _of_op(op: str, device: str, full: bool) -> Iterator[Job]:
    names = implementations(op, device)
    checks = [
        Job("check", op, implementation, case.name, dtype, tokens=tokens)
        for case, dtype, tokens in _checked(op, full, device)
        for implementation in names
        if implementation != "reference" or tokens or not case.large
    ]
    timed = list(_timed(op, names, device, full))
    # Order: each implementation's first case, the times, the rest; plain PyTorch comes last.
    first, checks = checks[: len(names)], checks[len(names) :]
    ours = [job for job in checks if job.implementation != "reference"]
    others = [job for job in checks if job.implementation == "reference"]
    yield from (*first, *timed, *ours, *others)


def implementations(op: str, device: str) -> list[str]:
    """Return the implementations for a device, including the reference, which runs anywhere."""
    kind = torch_device(device)
    listed = Table.tables[op].implementations
    return [i.name for i in listed if not i.devices or kind in i.devices]


def representative(op: str) -> list[cases.Case]:
    """Return cases that together take every branch of the kernels, the most ordinary first."""
    by_name = {case.name: case for case in cases.of(op).CASES}
    return [by_name[name] for name in cases.of(op).REPRESENTATIVE]


def few(case: cases.Case) -> int:
    """Return the number of tokens to check a case with: FEW for a large case; 0: the case's own."""
    return FEW if case.large else 0


def torch_device(device: str) -> str:
    return device.partition("-")[0]


def _checked(op: str, full: bool, device: str) -> Iterator[tuple[cases.Case, str, int]]:
    """Yield cases, dtypes and tokens; 0 is the case's own number.

    A quick run has the representative cases, with few tokens if they are large, the first one in
    all dtypes. A full run has all cases, except large ones on the emulated NPU, where they take
    minutes. `_of_op` leaves large ones out for plain PyTorch, too, which may run out of memory.
    """
    module, chosen = cases.of(op), representative(op)
    for number, case in enumerate(chosen):
        for dtype in DTYPES if full or not number else DTYPES[:1]:
            yield case, dtype, few(case)
    if not full:
        return
    rest = [case for case in module.CASES if not case.large and case not in chosen]
    yield from ((case, dtype, 0) for dtype in DTYPES for case in rest)
    if device != "npu-emulated":
        yield from ((case, DTYPES[0], 0) for case in module.CASES if case.large)


def _timed(op: str, names: list[str], device: str, full: bool) -> Iterator[Job]:
    """Yield timing jobs; none on the emulated NPU, which has no meaningful times."""
    if device == "npu-emulated":
        return
    small = (64,) if device == "cpu" else (1024,)
    more = (1, 512) if device == "cpu" else (1, 1024, 8192)
    having = [name for name in TIMED_MODELS if cases.of(op).of_model(MODELS[name], 1)]
    yield from timed(op, names, having[: None if full else 1], more if full else small)


def timed(
    op: str, names: Iterable[str], models: Iterable[str], tokens: Iterable[int],
    dtype: str = DTYPES[0],
) -> Iterator[Job]:  # fmt: skip
    """Yield a job for each implementation and shape of some models."""
    for model in models:
        for count in tokens:
            for case in cases.of(op).of_model(MODELS[model], count):
                for name in names:
                    yield Job("time", op, name, case.name, dtype, model, count)
