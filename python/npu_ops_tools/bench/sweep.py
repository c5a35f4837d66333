"""Sweeps: the benchmarks of an op over sizes, models, tensor-parallel ranks, dtypes and modes.

All combinations would be thousands of benchmarks per op, so a sweep varies one axis at a time. It
has every size of the first model in bf16. At the middle size, it has every dtype of the first
model, and every model and number of ranks in bf16.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator

import torch

from npu_ops.core import cases
from npu_ops.core.models import MODELS, divided
from npu_ops_tools import where
from npu_ops_tools.bench.peers import Absent

SIZES = (1, 16, 128, 1024, 8192, 32768)
SHAPES = ("qwen3.5-9b", "qwen3-vl-8b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b")
RANKS = (1, 4, 8)
MODES = ("forward", "backward", "forward+backward")


def first_case(op: str, model, size: int) -> cases.Case:
    """Return the first case of an op for a model, with `size` tokens; None if there is none."""
    return next(iter(cases.of(op).of_model(model, size)), None)


def of_sequences(op: str, model, size: int) -> cases.Case:
    """Return the first case of an op for a model, with one token in each of `size` sequences."""
    case = first_case(op, model, 1)
    return case and dataclasses.replace(case, sequences=size)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One case of a sweep in one mode and dtype.

    shape: the models and tensor-parallel ranks whose layers have this shape. peers: see `Sweep`.
    """

    sweep: Sweep
    shape: str
    size: int
    mode: str
    dtype: torch.dtype
    case: cases.Case
    peers: dict[str, Callable]

    @property
    def op(self) -> str:
        return self.sweep.op

    def inputs(self, device: str) -> dict:
        """Return the arguments of the op's public function and of the peers."""
        return self.sweep.prepare(self.case.inputs(self.dtype, device))

    @property
    def name(self) -> str:
        """The benchmark's name, unique within an op; `npu-ops bench OP --only NAME` repeats it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape}, {self.size} {self.sweep.unit}, {self.mode}, {dtype}"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Settings of the benchmarks of one op.

    peers: name -> a function without arguments. It returns the peer: a function with the arguments
    and results of the npu-ops function. If the peer is not installed, it raises `Absent`.
    compiled: name of the peer that is also timed under torch.compile.
    at_most: peer's name -> largest size to time, if larger ones take minutes.
    label: name of this sweep, if an op has several.
    prepare: converts a case's inputs to the arguments of the peers and of npu-ops.
    case: (op, model, size) -> a case, or None if the model has no such layer.
    unit: the unit of size.
    backward_to: the largest size with gradients; 0: no gradients.
    exact_to: the largest size whose error is measured against fp64. Beyond it, errors are against
    `beyond` in fp32: "reference", or a peer if the reference takes minutes.
    flop: case -> floating-point operations of a forward.
    moved: (case, inputs) -> bytes that a forward must move; None: the bytes of inputs and outputs.
    writes: arguments that the op overwrites.
    random: peers draw random numbers of their own, so their results are not compared.
    slack: factor by which the tolerances of `cases` are multiplied.
    """

    op: str
    peers: dict[str, Callable[[], Callable]]
    compiled: str | None = None
    at_most: dict[str, int] = dataclasses.field(default_factory=dict)
    label: str = ""
    prepare: Callable[[dict], dict] = dict
    case: Callable = first_case
    unit: str = "tokens"
    sizes: tuple[int, ...] = SIZES
    models: tuple[str, ...] = SHAPES
    backward_to: int = 8192
    exact_to: int = 8192
    beyond: str = "reference"
    flop: Callable[[cases.Case], int] | None = None
    moved: Callable[[cases.Case, dict], int] | None = None
    writes: tuple[str, ...] = ()
    random: bool = False
    slack: float = 2.0

    def found(self) -> tuple[dict[str, Callable], dict[str, str]]:
        """Return the peers that are available, and the reasons why the others are not."""
        present, absent = {}, {}
        for name, find in self.peers.items():
            try:
                present[name] = find()
            except Absent as why:
                absent[name] = str(why)
        return present, absent

    def benchmarks(self, quick: bool = False) -> Iterator[Benchmark]:
        """Yield the benchmarks. quick: only two sizes of the first model."""
        peers, _ = self.found()
        with_compile = dict(peers)
        if self.compiled in peers and not quick:
            with_compile["torch.compile"] = _compiled(peers[self.compiled])
        shapes = self._shapes(self.middle)
        first, *others = shapes if not quick else shapes[:1]
        sizes = (self.sizes[1], self.middle) if quick else self.sizes
        for size in sizes:
            for mode in self._modes(size):
                yield self._one(first, size, mode, torch.bfloat16, with_compile)
        for dtype in () if quick else (torch.float32, torch.float16):
            for mode in self._modes(self.middle):
                yield self._one(first, self.middle, mode, dtype, with_compile)
        for shape in others:
            for mode in self._modes(self.middle)[::2]:
                yield self._one(shape, self.middle, mode, torch.bfloat16, peers)

    @property
    def middle(self) -> int:
        """The size at which models and dtypes are compared."""
        return self.sizes[len(self.sizes) // 2]

    def _modes(self, size: int) -> tuple[str, ...]:
        return MODES if size <= self.backward_to else MODES[:1]

    def _shapes(self, size: int) -> list[tuple[str, Callable]]:
        """List the distinct shapes: a label and a model each.

        Models with equal shapes share a label: "qwen3.5-9b = qwen3.5-35b-a3b tp4".
        """
        names: dict[tuple, tuple[list[str], object]] = {}
        for ranks in RANKS:
            for name in self.models:
                model = divided(MODELS[name], ranks)
                case = self.case(self.op, model, size)
                if case is not None:
                    names.setdefault((ranks, case), ([], model))[0].append(name)
        return [
            (self._label(" = ".join(same), ranks), model)
            for (ranks, _), (same, model) in names.items()
        ]

    def _label(self, models: str, ranks: int) -> str:
        label = f"{self.label} of " if self.label else ""
        return f"{label}{models} tp{ranks}"

    def _one(self, shape, size, mode, dtype, peers) -> Benchmark:
        label, model = shape
        chosen = {n: f for n, f in peers.items() if size <= self.at_most.get(n, size)}
        return Benchmark(self, label, size, mode, dtype, self.case(self.op, model, size), chosen)


def _compiled(function: Callable) -> Callable:
    """Compile a function; allow a recompilation for each size, dtype and mode.

    By default torch gives up after 8 recompilations and runs the function uncompiled.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, 128)
    return torch.compile(function)


def discover(ops: list[str] | None = None) -> dict[str, pathlib.Path]:
    """Return the benchmark file of each op, in a clone of the repository.

    Raises:
        FileNotFoundError: there is no clone.
        ValueError: there is no such op.
    """
    folder = where.clone() / "benchmarks"
    files = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    unknown = set(ops or ()) - set(files)
    if unknown:
        raise ValueError(f"ops: got {sorted(unknown)}, needs some of {sorted(files)}")
    return {op: path for op, path in files.items() if not ops or op in ops}


def load(path: pathlib.Path) -> list[Sweep]:
    """Return the sweeps of a benchmark file."""
    _leave_frameworks_alone()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SWEEPS


def _leave_frameworks_alone() -> None:
    """Revert all adapters, so that a peer is the framework's own function."""
    if "npu_ops_adapters" in sys.modules:
        sys.modules["npu_ops_adapters"].revert()
    if "npu_ops_import_hook" in sys.modules:
        sys.modules["npu_ops_import_hook"].unwatch()
