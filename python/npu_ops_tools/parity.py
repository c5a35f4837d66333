"""Every op at the shapes of a model: the implementation that runs there against the reference.

The reference computes in fp64 from the same rounded inputs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import torch

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import error_ratio
from npu_ops.core.registry import Table, explain
from npu_ops_tools.where import ops


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes of a published model, all heads of it; `tp` divides them.

    section: None without multimodal positions. vision: heads and head dimension, or None.
    linear: key heads and value heads of Gated Delta Net, 128 wide, or None.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    rotary_dim: int = 128
    theta: float = 1e6
    section: tuple[int, int, int] | None = None
    section_layout: str = "interleaved"
    vision: tuple[int, int] | None = None
    linear: tuple[int, int] | None = None


_QWEN3_VL = {"theta": 5e6, "section": (24, 20, 20), "vision": (16, 72)}
_QWEN3_5 = {
    "head_dim": 256, "rotary_dim": 64, "theta": 1e7, "section": (11, 11, 10), "vision": (16, 72),
}  # fmt: skip

MODELS = {
    "qwen2-vl-7b": Model(
        3584, 28, 4, section=(16, 24, 24), section_layout="chunked", vision=(16, 80)
    ),  # fmt: skip
    "qwen3-4b": Model(2560, 32, 8),
    "qwen3-8b": Model(4096, 32, 8),
    "qwen3-30b-a3b": Model(2048, 32, 4),
    "qwen3-vl-4b": Model(2560, 32, 8, **_QWEN3_VL | {"vision": (16, 64)}),
    "qwen3-vl-8b": Model(4096, 32, 8, **_QWEN3_VL),
    "qwen3-vl-30b-a3b": Model(2048, 32, 4, **_QWEN3_VL),
    "qwen3-next-80b-a3b": Model(
        2048, 16, 2, head_dim=256, rotary_dim=64, theta=1e7, linear=(16, 32)
    ),  # fmt: skip
    "qwen3.5-4b": Model(2560, 16, 4, **_QWEN3_5, linear=(16, 32)),
    "qwen3.5-9b": Model(4096, 16, 4, **_QWEN3_5, linear=(16, 32)),
    "qwen3.5-27b": Model(5120, 24, 4, **_QWEN3_5, linear=(16, 48)),
    "qwen3.5-35b-a3b": Model(2048, 16, 2, **_QWEN3_5, linear=(16, 32)),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One op at one shape.

    implementation: what runs it. forward, backward: the largest ratio of an error to what passes,
        with the tensor it is of; None where there is none. passed: both are at most 1.
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
        ValueError: no such model, op or division of heads.
    """
    if model not in MODELS:
        raise ValueError(f"model: got {model!r}, needs one of {', '.join(MODELS)}")
    unknown = set(only or ()) - set(ops())
    if unknown:
        raise ValueError(f"ops: got {', '.join(sorted(unknown))}, needs some of {', '.join(ops())}")
    listed = list(cases(divided(MODELS[model], tp), tokens))
    absent = set(only or ()) - {op for op, _ in listed}
    if absent:
        raise ValueError(f"ops: got {', '.join(sorted(absent))}, which {model} does not have")
    for op, case in listed:
        if not only or op in only:
            yield measure(op, case, dtype, device)


def divided(model: Model, tp: int) -> Model:
    """What one of `tp` ranks has of a model."""

    def share(heads: int) -> int:
        if tp < 1 or heads % tp:
            raise ValueError(f"tp: got {tp}, needs a divisor of {heads} heads")
        return heads // tp

    return dataclasses.replace(
        model,
        heads=share(model.heads),
        kv_heads=max(1, model.kv_heads // tp),
        vision=model.vision and (share(model.vision[0]), model.vision[1]),
        linear=model.linear and tuple(map(share, model.linear)),
    )


def cases(model: Model, tokens: int) -> Iterator[tuple[str, object]]:
    """The cases of each op with the model's shapes, in place of those that an op lists itself."""
    heads = {"q_heads": model.heads, "k_heads": model.kv_heads, "head_dim": model.head_dim}
    rotary = heads | {"rotary_dim": model.rotary_dim, "theta": model.theta}
    grouped = {"heads": model.heads, "kv_heads": model.kv_heads, "dim": model.head_dim}
    yield _case("bias_dropout_add", "hidden", tokens=tokens, hidden=model.hidden)
    yield _case("rope", "text", tokens=tokens, **rotary)
    if model.section:
        sections = {"mrope_section": model.section, "section_layout": model.section_layout}
        yield _case("mrope", "text", tokens=tokens, **rotary, **sections)
    yield _case("attention", "text", tokens=tokens, **grouped, causal=True)
    yield _case("attention", "decode", tokens=1, **grouped, more=tokens - 1, causal=True)
    if model.vision:
        count, dim = model.vision
        packed = {"keys": "packed", "layout": "TND", "sequences": 2}
        yield _case("rope", "vision", tokens=tokens, q_heads=count, k_heads=count, head_dim=dim,
                    rotary_dim=dim, theta=1e4)  # fmt: skip
        yield _case("attention", "vision", tokens=tokens, heads=count, kv_heads=count, dim=dim,
                    **packed)  # fmt: skip
    if model.linear:
        yield from _linear(*model.linear, tokens)


def _linear(keys: int, values: int, tokens: int) -> Iterator[tuple[str, object]]:
    """Gated Delta Net: heads of 128 and a filter of 4."""
    rule = {"heads": keys, "value_heads": values, "keys": 128, "values": 128}
    channels = (2 * keys + values) * 128
    yield _case("causal_conv1d", "linear", tokens=tokens, channels=channels, width=4)
    yield _case("causal_conv1d_qkv", "linear", tokens=tokens, heads=(keys, values, 128, 128))
    yield _case("causal_conv1d_update", "decode", channels=channels, width=4)
    yield _case("gdn_gate", "linear", tokens=tokens, heads=values)
    yield _case("l2norm", "linear", tokens=tokens, heads=keys, dim=128)
    yield _case("chunk_gated_delta_rule", "linear", tokens=tokens, **rule)
    yield _case("fused_recurrent_gated_delta_rule", "decode", tokens=1, **rule)
    yield _case("gated_delta_rule_update", "decode", **rule)
    yield _case("rms_norm_gated", "linear", tokens=tokens, heads=values, dim=128)


def _case(op: str, name: str, **shape) -> tuple[str, object]:
    first = importlib.import_module(f"npu_ops.ops.{op}.cases").CASES[0]
    return op, dataclasses.replace(first, name=name, large=False, **shape)


def measure(op: str, case, dtype: torch.dtype, device: str) -> Row:
    """Compare the implementation that runs `case` on `device` with the reference."""
    module = importlib.import_module(f"npu_ops.ops.{op}.cases")
    name = getattr(case, "function", ops()[op][0])
    function = getattr(npu_ops, name)
    wrt = getattr(case, "differentiable", module.DIFFERENTIABLE)
    inputs = case.inputs(dtype, device)
    chosen = next(row for row in explain(name, **inputs) if row.why_not is None)
    actual = evaluate(function, inputs, wrt)
    expected = _expected(function, case, dtype, device, wrt)
    by_input = getattr(module, "TOLERANCES_BY_INPUT", False)
    used = {}
    for tensor, value in actual.items():
        sums = tensor == "gradient of bias" and hasattr(module, "SUM_TOLERANCES")
        tolerances = module.SUM_TOLERANCES if sums else module.TOLERANCES
        most = tolerances[dtype if by_input else value.dtype].ratio
        used[tensor] = error_ratio(value, expected[tensor]) / most
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
    """Outputs, inputs that were written, and gradients, by name, on the CPU."""
    torch.manual_seed(0)  # of dropout
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


def _expected(function, case, dtype, device, wrt) -> dict[str, torch.Tensor]:
    """What the reference computes in fp64 on the CPU."""
    inputs = {n: _double(x) for n, x in case.inputs(dtype, device).items()}
    with env.override(impl=dict.fromkeys(Table.tables, "reference")):
        return evaluate(function, inputs, wrt)


def _copied(value, leaf: bool):
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone()
    return value.requires_grad_() if leaf else value


def _double(value):
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.cpu().double() if floating else _on_cpu(value)


def _on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _weights(out: torch.Tensor, seed: int) -> torch.Tensor:
    """Sixteenths, the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(-64, 65, out.shape, generator=draw) / 16).to(out)


def line(row: Row) -> str:
    """A row as text, at most 80 columns."""
    backward = "-" if row.backward is None else f"{row.backward:.2f}"
    text = f"{row.op:34}{row.case:8}{row.implementation:15}{row.forward:9.2f}{backward:>10}"
    return text if row.passed else f"{text}\n  WRONG: {row.worst}"


HEAD = f"{'op':34}{'shape':8}{'runs by':15}{'forward':>9}{'backward':>10}"
