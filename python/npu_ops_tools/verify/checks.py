"""Checks one call by one implementation: values, bounds, determinism, streams and graphs."""

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

RUNS = 10  # runs that must agree bitwise
EMULATED_RUNS = 3  # on the emulated NPU, where programs run one after another, and slowly
RIGHT, WRONG, NOT_HERE = "right", "wrong", "not here"

Note = Callable[[str], None]
_FORCED = "NPU_OPS_IMPL forces"  # beginning of the registry's error for a forced implementation


class Declined(Exception):
    """The implementation does not support this call; the message says why."""


class Subject:
    """A call, run by one implementation on a device."""

    def __init__(self, job: Job, device: torch.device):
        self.job, self.device, self.case = job, device, job.find()
        self.function = cases.function(job.op, self.case)
        self.wrt = cases.differentiable(job.op, self.case)
        self.backward_declined: str | None = None

    def inputs(self, seed: int = 0) -> dict:
        return self.case.inputs(self.job.torch_dtype, self.device, seed)

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        """In a block, force the implementation for all operators of the op that have it.

        Dropout draws the same mask in every call.
        """
        name = self.job.implementation
        having = [op for op in tables(self.job.op) if name in preferences.implementations[op]]
        with env.override(impl=dict.fromkeys(having, name)), one_mask():
            yield

    def refuse_what_it_declines(self) -> None:
        """Raise Declined if the implementation does not support the call."""
        with self.forced():
            verdicts = explain(self.function, **self.inputs())
        for verdict in verdicts:
            if verdict.implementation == self.job.implementation and verdict.why_not:
                raise Declined(verdict.why_not)

    def results(self) -> dict[str, torch.Tensor]:
        """Return outputs, written arguments, and gradients, on the CPU.

        If the implementation supports only the forward, leave out the gradients, and store the
        reason in `backward_declined`.

        Raises:
            Declined: the implementation does not support the forward.
        """
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
        """Return a call's outputs, and its arguments afterwards, on their device."""
        with torch.no_grad():
            outputs = self.function(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        given = (*outputs, *inputs.values())
        return [x for x in given if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def one_mask() -> Iterator[None]:
    """In a block, give dropout seed 3 and offset 5 in every call.

    Both are created on the device, because a graph capture cannot copy from the host.
    """

    def state(device, generator):
        return torch.arange(3, 6, 2, dtype=torch.int64, device=device)

    with mock.patch.object(rng, "new_state", state):
        yield


class Expected:
    """The reference's results on the CPU, in fp64, or in fp32 for large cases and models' cases.

    The fp64 results are cached.
    """

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
    """Yield the name and the result of each check.

    Bounds come first. If they are wrong, the other checks do not run: a write out of bounds may
    break any of them.
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
    """Compare the results with the expected values.

    used: the largest error / tolerance of the tensors that pass. tensor: which of them has it.
    """
    if results.keys() != expected.keys():
        names = ", ".join(sorted(results.keys() ^ expected.keys()))
        return _verdict([f"{names}: written by only one of implementation and reference"])
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
    """Check that RUNS runs, or EMULATED_RUNS on the emulated NPU, agree bitwise."""
    first = subject.results()
    for run in range(2, (EMULATED_RUNS if is_emulated() else RUNS) + 1):
        for name, value in subject.results().items():
            differing = _differing(value, first[name])
            if differing:
                return _verdict([f"run {run} differs from run 1 in {differing} elements of {name}"])
    return _verdict([])


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the number of elements that differ bitwise."""
    if not a.numel():
        return 0
    return int((bits(a) != bits(b)).any(-1).sum())


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, `[elements, bytes]`, on the CPU."""
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
    """Return whether values can be replaced: a floating tensor without overlapping elements."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floating and not any(s == 0 for s in value.stride())


def _agree(got: list[torch.Tensor], wanted: list[torch.Tensor], where: str) -> dict:
    differing = sum(_differing(a, b) for a, b in zip(got, wanted, strict=True))
    return _verdict([f"{differing} elements differ {where}"] if differing else [])


def _keep_busy(device: torch.device) -> None:
    """Launch milliseconds of work, so that a launch on another stream would run first."""
    size = 256 if is_emulated() else 4096
    x = torch.zeros((size, size), dtype=torch.float32, device=device)
    for _ in range(20):
        x = x @ x


def is_emulated() -> bool:
    import npu_ops_emulator

    return npu_ops_emulator.installed()


def graphs(subject: Subject) -> dict:
    """Check that a captured call uses its inputs' values at replay."""
    kinds = {"npu": "NPUGraph", "cuda": "CUDAGraph"}
    backend = getattr(torch, subject.device.type)
    if not hasattr(backend, kinds.get(subject.device.type, "")):
        return {"verdict": NOT_HERE, "detail": f"{subject.device.type} has no graphs"}
    if is_emulated():  # tests/ops/test_graphs.py tests the emulated NPU's graphs
        return {"verdict": NOT_HERE, "detail": "not checked on the emulated NPU"}
    if subject.job.implementation == "reference":
        return {"verdict": NOT_HERE, "detail": "the reference may read values on the host"}
    graph = getattr(backend, kinds[subject.device.type])()
    with subject.forced():
        static = subject.inputs(seed=0)
        _warm_up(backend, subject)
        try:
            with backend.graph(graph):
                got = subject.outcome(static)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            # the implementation does not support this call in a graph
            if "NPU_OPS_IMPL forces" in reason:
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
    """Compile and allocate outside the capture."""
    stream = backend.Stream()
    stream.wait_stream(backend.current_stream())
    with backend.stream(stream):
        for _ in range(2):
            subject.outcome(subject.inputs())
    backend.current_stream().wait_stream(stream)


def tables(op: str) -> list[str]:
    """Return the names of an op's tables: one per operator, forward and backward."""
    return [name for name, table in Table.tables.items() if table.folder == op]
