"""What one call of one implementation must be: right, within its tensors, the same each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from npu_ops.core import cases, env, library, preferences, rng
from npu_ops.core.compare import assert_close, error_ratio, max_error
from npu_ops.core.registry import Table, explain
from npu_ops_tools import parity
from npu_ops_tools.verify import guards
from npu_ops_tools.verify.jobs import Job

RUNS = 10  # that must agree in every bit
EMULATED_RUNS = 3  # where one program runs after another, and slowly
RIGHT, WRONG, NOT_HERE = "right", "wrong", "not here"

Note = Callable[[str], None]
_FORCED = "NPU_OPS_IMPL forces"  # how the registry's refusals begin


class Declined(Exception):
    """The implementation does not take this call; says why."""


class Subject:
    """A call, made by one implementation on a device."""

    def __init__(self, job: Job, device: torch.device):
        self.job, self.device, self.case = job, device, job.find()
        self.function = cases.function(job.op, self.case)
        self.wrt = cases.differentiable(job.op, self.case)
        self.backward_declined: str | None = None

    def inputs(self, seed: int = 0) -> dict:
        return self.case.inputs(self.job.torch_dtype, self.device, seed)

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        """The implementation runs all operators of the op that it has; what drops, drops always the
        same."""
        name = self.job.implementation
        having = [op for op in tables(self.job.op) if name in preferences.implementations[op]]
        with env.override(impl=dict.fromkeys(having, name)), one_mask():
            yield

    def refuse_what_it_declines(self) -> None:
        """Raises Declined; forgets the gradients if only the backward is declined."""
        with self.forced():
            verdicts = explain(self.function, **self.inputs())
        for verdict in verdicts:
            if verdict.implementation == self.job.implementation and verdict.why_not:
                raise Declined(verdict.why_not)

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs, what was written, and gradients, on the CPU."""
        with self.forced():
            try:
                return parity.evaluate(self.function, self.inputs(), self.wrt)
            except RuntimeError as error:
                if not str(error).startswith(_FORCED):
                    raise
                if not self.wrt or "_backward=" not in str(error).partition(",")[0]:
                    raise Declined(str(error).partition("but ")[2]) from None
                self.backward_declined, self.wrt = str(error).partition("but ")[2], ()
                return parity.evaluate(self.function, self.inputs(), self.wrt)

    def outcome(self, inputs: dict) -> list[torch.Tensor]:
        """What a call returns, and its arguments afterwards, where they are."""
        with torch.no_grad():
            outputs = self.function(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        given = (*outputs, *inputs.values())
        return [x for x in given if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def one_mask() -> Iterator[None]:
    """Every call drops with seed 3 and offset 5.

    They are made on the device: a graph that is being captured takes nothing from the host.
    """

    def state(device, generator):
        return torch.arange(3, 6, 2, dtype=torch.int64, device=device)

    with mock.patch.object(rng, "new_state", state):
        yield


class Expected:
    """What the reference computes in fp64 on the CPU; small cases are kept for the next
    implementation."""

    def __init__(self):
        self._kept: dict[tuple, dict] = {}

    def of(self, subject: Subject) -> dict[str, torch.Tensor]:
        job, wrt = subject.job, tuple(subject.wrt)
        key = (job.op, job.case, job.tokens, job.dtype, wrt)
        if key in self._kept and not job.model:
            return self._kept[key]
        large = subject.case.large or job.model
        with one_mask():
            found = parity.by_reference(
                subject.function, subject.inputs(), wrt, torch.float32 if large else torch.float64
            )
        if not large:
            self._kept[key] = found
        return found


def check(subject: Subject, expected: Expected, note: Note) -> Iterator[tuple[str, dict]]:
    """Yield the name of each check and what it found, until one is wrong.

    Bounds come first: what writes beside its tensors may break anything that comes later.
    """
    poisoned = mock.patch.object(library, "poison_outputs", True)
    found: list[str] = []
    with poisoned, guards.guarded(found, lambda op: note(f"bounds: {op}")):
        results = subject.results()
    yield "bounds", _verdict(found)
    if found:
        return
    note("values")
    wanted = expected.of(subject)
    yield "values", values(subject, results, wanted)
    for name, one in (("determinism", determinism), ("streams", streams), ("graphs", graphs)):
        note(name)
        with guards.noted(lambda table, _, name=name: note(f"{name}: {table.op}")):
            yield name, one(subject)


def _verdict(wrong: list[str]) -> dict:
    return {"verdict": WRONG if wrong else RIGHT, "detail": "; ".join(dict.fromkeys(wrong))}


def values(subject: Subject, results: dict, expected: dict) -> dict:
    """`used`: the largest error as a part of what is allowed, and of which tensor."""
    if results.keys() != expected.keys():
        names = ", ".join(sorted(results.keys() ^ expected.keys()))
        return _verdict([f"{names}: written by one of implementation and reference alone"])
    wrong, used = [], {}
    for name, value in results.items():
        tolerance = cases.tolerance(subject.job.op, name, value, subject.job.torch_dtype)
        try:
            assert_close(name, value, expected[name], tolerance)
        except AssertionError as error:
            wrong.append(str(error))
            continue
        used[name] = max(
            error_ratio(value, expected[name]) / tolerance.ratio,
            max_error(value, expected[name]) / tolerance.max_abs,
        )
    worst = max(used, key=used.__getitem__, default=None)
    about = {"used": used[worst], "tensor": worst} if worst else {}
    return _verdict(wrong) | about


def determinism(subject: Subject) -> dict:
    """Ten runs agree in every bit."""
    first = subject.results()
    for run in range(2, (EMULATED_RUNS if is_emulated() else RUNS) + 1):
        for name, value in subject.results().items():
            differing = _differing(value, first[name])
            if differing:
                return _verdict([f"run {run} differs from run 1 in {differing} elements of {name}"])
    return _verdict([])


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements are not the same bits."""
    if not a.numel():
        return 0
    return int((bits(a) != bits(b)).any(-1).sum())


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, `[elements, bytes]`, on the CPU."""
    dense = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.view(-1, 1).view(torch.uint8)


def streams(subject: Subject) -> dict:
    """Check that a call launches on the current stream.

    Its inputs are filled with NaN and get their values late, by copies on that stream.
    """
    if subject.device.type == "cpu":
        return {"verdict": NOT_HERE, "detail": "a CPU has no streams"}
    backend = getattr(torch, subject.device.type)
    late = subject.inputs()
    floats = {n: x.clone() for n, x in late.items() if _changes(x)}
    with subject.forced():
        wanted = subject.outcome(subject.inputs())
        for name in floats:
            late[name].fill_(float("nan"))
        backend.synchronize()
        stream = backend.Stream()
        with backend.stream(stream):
            _keep_busy(subject.device)
            for name, x in floats.items():
                late[name].copy_(x)
            got = subject.outcome(late)
        stream.synchronize()
    return _agree(got, wanted, "on another stream")


def _changes(value) -> bool:
    """Whether other numbers can be put there: floating, and each element in a place of its own."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floating and not any(s == 0 for s in value.stride())


def _agree(got: list[torch.Tensor], wanted: list[torch.Tensor], where: str) -> dict:
    differing = sum(_differing(a, b) for a, b in zip(got, wanted, strict=True))
    return _verdict([f"{differing} elements differ {where}"] if differing else [])


def _keep_busy(device: torch.device) -> None:
    """Milliseconds of work, so that what is launched elsewhere comes first."""
    size = 256 if is_emulated() else 4096
    x = torch.zeros((size, size), dtype=torch.float32, device=device)
    for _ in range(20):
        x = x @ x


def is_emulated() -> bool:
    import npu_ops_emulator

    return npu_ops_emulator.installed()


def graphs(subject: Subject) -> dict:
    """A captured call computes from what is in its inputs when it is replayed."""
    kinds = {"npu": "NPUGraph", "cuda": "CUDAGraph"}
    backend = getattr(torch, subject.device.type)
    if not hasattr(backend, kinds.get(subject.device.type, "")):
        return {"verdict": NOT_HERE, "detail": f"{subject.device.type} has no graphs"}
    if is_emulated():  # its graphs are tested with every operator: tests/ops/test_graphs.py
        return {"verdict": NOT_HERE, "detail": "not part of this on the emulated NPU"}
    if subject.job.implementation == "reference":
        return {"verdict": NOT_HERE, "detail": "the reference may read on the host"}
    graph = getattr(backend, kinds[subject.device.type])()
    with subject.forced():
        static = subject.inputs(seed=0)
        _warm_up(backend, subject)
        try:
            with backend.graph(graph):
                got = subject.outcome(static)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "NPU_OPS_IMPL forces" in reason:  # in a graph it declines this call
                return {"verdict": NOT_HERE, "detail": reason}
            return _verdict([f"cannot be captured: {reason}"])
        other = subject.inputs(seed=1)
        given = {n: other[n] if _fits(static[n], other[n]) else x for n, x in static.items()}
        wanted = subject.outcome({n: _own(x) for n, x in given.items()})
        for name, x in given.items():
            if x is not static[name]:
                static[name].copy_(x)
        graph.replay()
        backend.synchronize()
    return _agree(got, wanted, "when the graph is replayed with other inputs")


def _fits(static, other) -> bool:
    return _changes(static) and static.shape == other.shape


def _own(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def _warm_up(backend, subject: Subject) -> None:
    """Compiles and allocates outside of the capture."""
    stream = backend.Stream()
    stream.wait_stream(backend.current_stream())
    with backend.stream(stream):
        for _ in range(2):
            subject.outcome(subject.inputs())
    backend.current_stream().wait_stream(stream)


def tables(op: str) -> list[str]:
    """The names of an op's tables: one of each operator, forward and backward."""
    return [name for name, table in Table.tables.items() if table.folder == op]
