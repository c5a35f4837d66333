"""Prepares the work of one benchmark: inputs, a call for each provider, bytes, and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch._functorch.config as functorch

from npu_ops.core import cases, env
from npu_ops.core.compare import error_ratio
from npu_ops.core.registry import Table, explain
from npu_ops_tools import parity
from npu_ops_tools.bench.sweep import Benchmark

OURS = "npu-ops"
# Equal calls before the one whose backward is timed, as in training: some providers cache after
# the first calls, which changes their graph. npu-ops reuses its cached decision from the second
# call on.
_STEPS_BEFORE = 4
# torch.compile frees buffers during a backward; here backwards are repeated.
functorch.donated_buffer = False


class Work:
    """Calls without arguments that do a benchmark's work, one per provider.

    calls: each returns a tuple of tensors.
    implementations: npu-ops' providers -> the implementation that each runs.
    moved: bytes that must be read or written.
    flop: floating-point operations, or None.
    """

    def __init__(self, benchmark: Benchmark, device: str):
        self.benchmark, self.device = benchmark, device
        self.given = benchmark.inputs(device)
        self.wrt = [
            name
            for name in cases.differentiable(benchmark.op, benchmark.case)
            if isinstance(self.given.get(name), torch.Tensor)
        ]
        public = cases.function(benchmark.op, benchmark.case)
        self.implementations = _takers(benchmark.op, public, self.given)
        ours = {
            name: functools.partial(_by, benchmark.op, implementation, public)
            for name, implementation in list(self.implementations.items())[1:]
        }
        self._functions = {OURS: public, **ours, **benchmark.peers}
        self._weights = self._draw_weights(public)
        self.calls = {
            name: self._call(f, self._own(), _STEPS_BEFORE) for name, f in self._functions.items()
        }
        self.moved = self._moved()
        flop = benchmark.sweep.flop and benchmark.sweep.flop(benchmark.case)
        # A backward has two matrix products for each one of the forward.
        self.flop = flop and flop * {"forward": 1, "backward": 2}.get(benchmark.mode, 3)

    def _own(self) -> dict:
        """Return the inputs, with copies of those that are overwritten."""
        return self.given | {name: self.given[name].clone() for name in self.benchmark.sweep.writes}

    def _draw_weights(self, public) -> list[torch.Tensor]:
        """Draw a gradient for each output."""
        if self.benchmark.mode == "forward":
            return []
        with torch.no_grad():
            outputs = _outputs(public, self._own())
        draw = torch.Generator().manual_seed(1)
        return [torch.randn(out.shape, generator=draw).to(out) for out in outputs]

    def _call(self, function: Callable, inputs: dict, steps_before=0) -> Callable[[], tuple]:
        if self.benchmark.mode == "forward":
            return functools.partial(_forward, function, inputs)
        leaves = {name: inputs[name].detach().requires_grad_() for name in self.wrt}
        inputs = inputs | leaves
        if self.benchmark.mode == "forward+backward":
            return lambda: self._gradients(_outputs(function, inputs), leaves)
        graph: list = []  # filled by the first call, which is not timed

        def backward():
            if not graph:
                # Run here, after the errors were checked: checking clears what these calls cache.
                for _ in range(steps_before):
                    _outputs(function, inputs)
                graph.extend(_outputs(function, inputs))
            return self._gradients(graph, leaves, retain_graph=True)

        return backward

    def _gradients(self, outputs, leaves: dict, **options) -> tuple:
        weights = [w.to(out) for w, out in zip(self._weights, outputs, strict=True)]
        return torch.autograd.grad(outputs, list(leaves.values()), weights, **options)

    def _moved(self) -> int:
        """Return the bytes moved; by default each input is read and each output written once."""
        sweep, mode = self.benchmark.sweep, self.benchmark.mode
        read = sum(x.nbytes for x in self.given.values() if isinstance(x, torch.Tensor))
        if mode == "forward":
            if sweep.moved:
                return sweep.moved(self.benchmark.case, self.given)
            return read + sum(out.nbytes for out in self.calls[OURS]())
        weights = sum(w.nbytes for w in self._weights)
        gradients = sum(self.given[name].nbytes for name in self.wrt)
        backward = read + weights + gradients
        return backward if mode == "backward" else backward + read + weights

    def against(self) -> str:
        """Return the name of the baseline for errors."""
        sweep = self.benchmark.sweep
        exact = self.benchmark.size <= sweep.exact_to
        return "reference in fp64" if exact else f"{sweep.beyond} in fp32"

    def errors(self) -> dict[str, float]:
        """Return the largest ratio of an error's RMS to the result's, for each provider.

        Raises:
            AssertionError: npu-ops' error exceeds the tolerance of `cases`.
        """
        expected = self._expected()
        found = {}
        for name in self.calls:
            if name in self.implementations or not self.benchmark.sweep.random:
                actual = self._once(self._functions[name], self._own())
                errors = [
                    error_ratio(a.cpu(), e.cpu()) for a, e in zip(actual, expected, strict=True)
                ]
                found[name] = max(errors)
                if name in self.implementations:
                    self._judge(name, actual, errors)
        return found

    def _judge(self, name, actual, errors) -> None:
        mode, op, dtype = self.benchmark.mode, self.benchmark.op, self.benchmark.dtype
        for n, (result, error) in enumerate(zip(actual, errors, strict=True)):
            what = f"output {n}" if mode == "forward" else f"gradient of {self.wrt[n]}"
            allowed = cases.tolerance(op, what, result, dtype).ratio * self.benchmark.sweep.slack
            if not error <= allowed:
                raise AssertionError(
                    f"{op}: {self.benchmark.name}: {name}: {what}: error ratio {error:.2e}, needs "
                    f"{allowed:.1e} before it is timed"
                )

    def _once(self, function, inputs) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        return self._call(function, inputs)()

    def _expected(self) -> tuple[torch.Tensor, ...]:
        """Return the expected results. Cached for the next mode, which has the same gradients."""
        benchmark = self.benchmark
        what = (benchmark.mode == "forward", benchmark.op, benchmark.shape, benchmark.size)
        if _kept.get("key") != (*what, benchmark.dtype):
            _kept.clear()
            _kept.update(key=(*what, benchmark.dtype), value=self._compute_expected())
        return _kept["value"]

    def _compute_expected(self) -> tuple[torch.Tensor, ...]:
        sweep = self.benchmark.sweep
        inputs, function = self._own(), self._functions[OURS]
        if self.benchmark.size <= sweep.exact_to:
            inputs = {name: parity.widened(x, torch.float64) for name, x in inputs.items()}
        else:
            inputs = {name: _single(x) for name, x in inputs.items()}
            if sweep.beyond != "reference":
                return self._once(self.benchmark.peers[sweep.beyond], inputs)
        with env.override(impl=dict.fromkeys(Table.tables, "reference")):
            return self._once(function, inputs)


_kept: dict = {}


def _takers(op: str, public: Callable, inputs: dict) -> dict[str, str]:
    """Return the implementations that support the call, by provider.

    The provider OURS is npu-ops' first choice. The others exclude the reference.
    """
    verdicts = [v for v in explain(public, **inputs) if v.op == op]
    first = next(v.implementation for v in verdicts if v.why_not is None)
    others = [
        v.implementation
        for v in verdicts
        if (v.why_not or "").endswith("comes first") and v.implementation != "reference"
    ]
    return {OURS: first} | {f"{OURS} {name}": name for name in others}


def _by(op: str, implementation: str, public: Callable, **inputs):
    with env.override(impl={op: implementation}):
        return public(**inputs)


def _outputs(function, inputs) -> tuple[torch.Tensor, ...]:
    outputs = function(**inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return tuple(out for out in outputs if out is not None)


def _forward(function, inputs) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return _outputs(function, inputs)


def _single(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floating else value
