"""Compares the implementation that runs each op with the reference, at the shapes of a model.

The reference computes in fp64 from the same rounded inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from npu_ops.core import cases, env
from npu_ops.core.compare import error_ratio
from npu_ops.core.models import MODELS, Model, divided
from npu_ops.core.registry import Table, explain
from npu_ops_tools.where import ops


@dataclasses.dataclass(frozen=True)
class Row:
    """The result for one op at one shape.

    implementation: name of the implementation that ran.
    forward, backward: the largest ratio of an error to its tolerance; None without a backward.
    worst: the tensor with the largest ratio.
    passed: all ratios are at most 1.
    """

    op: str
    case: str
    implementation: str
    forward: float
    backward: float | None
    worst: str
    passed: bool


def run(model: str, dtype: torch.dtype, device="cpu", tokens: int = 64, tp: int = 1, only=None):
    """Yield a `Row` for each op that the model has.

    Raises:
        ValueError: there is no such model or op, or `tp` does not divide the heads.
    """
    if model not in MODELS:
        raise ValueError(f"model: got {model!r}, needs one of {', '.join(MODELS)}")
    unknown = set(only or ()) - set(ops())
    if unknown:
        raise ValueError(f"ops: got {', '.join(sorted(unknown))}, needs some of {', '.join(ops())}")
    listed = list(of_model(divided(MODELS[model], tp), tokens))
    absent = set(only or ()) - {op for op, _ in listed}
    if absent:
        raise ValueError(f"ops: got {', '.join(sorted(absent))}, which {model} does not have")
    for op, case in listed:
        if not only or op in only:
            yield measure(op, case, dtype, device)


def of_model(model: Model, tokens: int) -> Iterator[tuple[str, cases.Case]]:
    """Yield each op's cases with the model's shapes."""
    return ((op, case) for op in ops() for case in cases.of(op).of_model(model, tokens))


def measure(op: str, case, dtype: torch.dtype, device: str) -> Row:
    """Compare the implementation that runs `case` on `device` with the reference."""
    function, wrt = cases.function(op, case), cases.differentiable(op, case)
    chosen = next(r for r in explain(function, **case.inputs(dtype, device)) if r.why_not is None)
    actual = evaluate(function, case.inputs(dtype, device), wrt)
    expected = by_reference(function, case.inputs(dtype, device), wrt)
    used = {
        name: error_ratio(x, expected[name]) / cases.tolerance(op, name, x, dtype).ratio
        for name, x in actual.items()
    }
    return _row(op, case, chosen.implementation, used)


def _row(op, case, implementation, used) -> Row:
    backward = [n for tensor, n in used.items() if tensor.startswith("gradient")]
    forward = [n for tensor, n in used.items() if not tensor.startswith("gradient")]
    return Row(
        op=op,
        case=case.name,
        implementation=implementation,
        forward=max(forward),
        backward=max(backward, default=None),
        worst=max(used, key=used.__getitem__),
        passed=all(n <= 1 for n in used.values()),
    )


def evaluate(function, inputs: dict, wrt: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return outputs, inputs that were written, and gradients, by name, on the CPU."""
    torch.manual_seed(0)  # seed for dropout
    inputs = {name: _copied(value, name in wrt) for name, value in inputs.items()}
    before = {n: x.detach().clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [out for out in outputs if out is not None]
    found = {f"output {n}": out.detach() for n, out in enumerate(outputs)}
    found |= {f"{n} after": inputs[n] for n, x in before.items() if not torch.equal(inputs[n], x)}
    leaves = {n: inputs[n] for n in wrt if isinstance(inputs.get(n), torch.Tensor)}
    if leaves:
        weights = [_weights(out, n) for n, out in enumerate(outputs)]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
        found |= {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return {name: value.cpu() for name, value in found.items()}


def by_reference(function, inputs: dict, wrt, wide=torch.float64) -> dict[str, torch.Tensor]:
    """Return the reference's results on the CPU from the same inputs, in a wider dtype."""
    inputs = {name: widened(value, wide) for name, value in inputs.items()}
    with env.override(impl=dict.fromkeys(Table.tables, "reference")):
        return evaluate(function, inputs, wrt)


def _copied(value, leaf: bool):
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone()
    return value.requires_grad_() if leaf else value


def widened(value, wide: torch.dtype):
    """Move a tensor, or a tuple of them, to the CPU; floating ones are cast to `wide`."""
    if isinstance(value, tuple):
        return tuple(widened(item, wide) for item in value)
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.cpu().to(wide) if floating else _on_cpu(value)


def _on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _weights(out: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random gradients for `out`: multiples of 1/16, the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(-64, 65, out.shape, generator=draw) / 16).to(out)


def line(row: Row) -> str:
    """Format a row as text, at most 80 columns."""
    backward = "-" if row.backward is None else f"{row.backward:.2f}"
    text = f"{row.op:34}{row.case:8}{row.implementation:15}{row.forward:9.2f}{backward:>10}"
    return text if row.passed else f"{text}\n  WRONG: {row.worst}"


HEAD = f"{'op':34}{'shape':8}{'runs by':15}{'forward':>9}{'backward':>10}"
