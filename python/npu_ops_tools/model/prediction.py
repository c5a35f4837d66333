"""Predicts the time of a launch. Predictions are not measurements; their label is `npu-model`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

import torch
from npu_ops_emulator import vendor

from npu_ops_tools.compile.launches import Launch
from npu_ops_tools.model import costs, interpreted, ir, machine
from npu_ops_tools.model.core import Span

LABEL = "npu-model"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction. Times in microseconds, bytes of the whole launch.

    us: the simulated time.
    likely_us: `us` corrected by measured times of such kernels; low_us, high_us: the range that
    contains four of five of them (docs/npu-model.md).
    bottleneck: "start" of the programs or "memory", if that takes longest; else the busiest pipe,
    or "waiting" if none is busy half of the time.
    shares: pipe -> fraction of the longest simulated program's time in which the pipe is busy.
    loaded, stored: bytes from and to the tensors.
    workspace: bytes that cube and vector cores pass to each other.
    limit_us: time to move the bytes of its tensors once, or the bytes that it moves if those are
    fewer.
    balance: mean work of the cores over the work of the busiest core.
    assumed: a condition depends on vectors, e.g. a check of lengths, and was assumed to hold.
    backward: whether autograd launches it.
    """

    kernel: str
    case: str
    soc: str
    us: float
    likely_us: float
    low_us: float
    high_us: float
    bottleneck: str
    shares: dict[str, float]
    loaded: float
    stored: float
    workspace: float
    limit_us: float
    balance: float
    programs: int
    waves: int
    core: str
    assumed: bool
    backward: bool
    label: str = LABEL
    spans: dict[str, list[Span]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def of_limit(self) -> float:
        """Speed relative to the memory limit: 1 is as fast as memory allows, 0.5 half as fast."""
        return min(1.0, self.limit_us / self.us)

    def fields(self) -> dict:
        """Return the fields for JSON and CSV."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if name != "spans"} | {
            "of_limit": self.of_limit
        }


def predict(launch: Launch, soc: str, *, unknown: Iterable[torch.Tensor] = (), spans: bool = False):
    """Predict a recorded launch on `soc`.

    unknown: tensors whose values differ from those at the launch, because earlier kernels of the
    same call write them.

    Returns:
        A `Prediction`.

    Raises:
        machine.Unknown: the model lacks knowledge of the kernel; the error lists all unknowns.
        ValueError: there are no costs for this SoC.
        vendor.CompileError: the kernel does not compile.
    """
    return _predict(launch, soc, module_of(launch, soc), unknown, spans)


def predict_all(
    launches: Iterable[Launch], soc: str, *, spans: bool = False
) -> Iterator[Prediction]:
    """Predict each launch of a call, in order.

    The values that a kernel writes are unknown to later kernels. Kernels whose tensors are all
    int32 are an exception, because they were interpreted when they were recorded.
    """
    written: list[torch.Tensor] = []
    for launch in launches:
        module = module_of(launch, soc)
        yield _predict(launch, soc, module, written, spans)
        if not interpreted.has_indices_alone(launch):
            tensors = [value for value in launch.values if isinstance(value, torch.Tensor)]
            written += [x for kind, x in zip(module.pointers, tensors) if kind != "input"]  # noqa: B905


def module_of(launch: Launch, soc: str) -> ir.Module:
    """Compile a launch with the vendor's compiler, and parse the result."""
    target = soc.removesuffix("-1")  # -1 means twice the memory; the compiler makes no difference
    options = dict(launch.options)
    text = vendor.lower(
        launch.kernel, dict(launch.signature), dict(launch.constants), target, **options
    )
    return ir.parse(vendor.pipes(launch.name, text, target, **options))


def _predict(
    launch: Launch, soc: str, module: ir.Module, unknown: Iterable, spans: bool
) -> Prediction:
    prices = costs.of(soc)
    tensors = [value for value in launch.values if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}
    footprint = float(sum(storages.values()))
    load = _loader(_storages(unknown))
    grid = (*launch.grid, 1, 1)[:3]
    time = machine.run(
        module, list(launch.values), grid, prices, footprint=footprint, load=load, spans=spans
    )
    return _summary(launch, soc, module, time, prices, footprint, grid)


def _summary(launch, soc, module, time, prices, footprint, grid) -> Prediction:
    needed = min(footprint, time.moved.get("loaded", 0.0) + time.moved.get("stored", 0.0))
    first = max(time.programs, key=lambda walked: walked.time)
    shares = {name: busy / first.time for name, busy in sorted(first.busy.items())}
    low, likely, high = (time.total * factor for factor in prices.within(module.core))
    return Prediction(
        kernel=launch.name, case=launch.case, soc=soc, us=time.total, likely_us=likely, low_us=low,
        high_us=high,
        bottleneck=_bottleneck(time, shares), shares=shares,
        loaded=time.moved.get("loaded", 0.0), stored=time.moved.get("stored", 0.0),
        workspace=time.moved.get("workspace", 0.0), limit_us=needed / prices.memory,
        balance=time.balance, programs=grid[0] * grid[1] * grid[2], waves=time.waves,
        core=module.core, assumed=any(each.assumed for each in time.programs),
        backward=launch.backward,
        spans=first.spans or time.programs[0].spans,
    )  # fmt: skip


def _bottleneck(time: machine.Time, shares: dict[str, float]) -> str:
    if time.start > max(time.memory, time.cores):
        return "start"
    if time.memory > time.cores:
        return "memory"
    pipe = max(shares, key=shares.get)
    return pipe if shares[pipe] >= 0.5 else "waiting"


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _loader(unknown: set[int]):
    """Return a function that loads integers from a launch's tensors; loop bounds need no other
    values."""

    def load(tensor, offset: int):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype.is_floating_point:
            return None
        storage = tensor.untyped_storage()
        first = tensor.storage_offset() + offset
        outside = first < 0 or (first + 1) * tensor.itemsize > storage.nbytes()
        if outside or storage.data_ptr() in unknown:
            return None
        return int(tensor.as_strided((1,), (1,), first))

    return load


def totals(found: list[Prediction]) -> dict[str, float]:
    """Sum the predictions of one call's launches."""
    names = ("us", "likely_us", "low_us", "high_us", "limit_us", "loaded", "stored", "workspace")
    summed: collections.Counter[str] = collections.Counter()
    for prediction in found:
        summed.update({name: getattr(prediction, name) for name in names})
    return dict(summed)
