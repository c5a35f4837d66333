"""Ways to call a function (eager, compiled, ...), its gradients and transforms (vmap, jvp, ...)."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npu_ops
from fuzz import files

WAYS = (
    "eager", "watched", "compiled", "inference", "checkpoint", "explained", "preferred", "alone"
)  # fmt: skip
TRANSFORMS = ("func.grad", "func.jvp", "forward AD", "func.vmap", "twice")


class Watching(TorchDispatchMode):
    """A dispatch mode that changes nothing.

    It stands for the mode of a profiler, an op counter or selective checkpointing.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Compiled:
    """A function that is compiled once for several calls."""

    def __init__(self, function, fullgraph: bool):
        torch._dynamo.reset()

        def call(arguments):
            return function(**arguments)

        self.call = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)

    def __call__(self, **arguments):
        return self.call(arguments)


def caller(function, way: str, seed: int, *, refused: bool):
    """Return a function that calls `function` in the given way, one of WAYS.

    refused: the call may raise. Then graph breaks are allowed, because a full graph would wrap the
        error.
    """
    if way == "compiled":
        return Compiled(function, fullgraph=not refused)

    def call(**arguments):
        match way:
            case "watched":
                with Watching():
                    return function(**arguments)
            case "inference":
                with torch.inference_mode():
                    return function(**arguments)
            case "checkpoint":
                return checkpoint(lambda: function(**arguments), use_reentrant=False)
            case "preferred":
                with files.in_force(seed) as is_table:
                    if is_table:
                        return function(**arguments)
            case "explained":
                npu_ops.explain(function.__name__, **arguments)
        return function(**arguments)

    return call


@contextlib.contextmanager
def defaults(dtype: str, device: str | None, how: str):
    """Set torch's default dtype and device within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    if device is None:
        inner = contextlib.nullcontext()
    elif how == "context":
        inner = torch.device(device)
    else:
        inner = default_device(device)
    try:
        with inner:
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def listed(outputs) -> list:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def gradients(outputs: list, leaves: dict, seeds: list) -> dict:
    """Return gradients by name; zeros if no output depends on a leaf."""
    pairs = [
        (out, seed.to(out.dtype)) for out, seed in zip(outputs, seeds, strict=True)
        if out is not None and out.requires_grad
    ]  # fmt: skip
    if not pairs or not leaves:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, list(leaves.values()), grads, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def transformed(function, arguments: dict, wrt: tuple[str, ...], transform: str, directions: dict):
    """Return the results of a transform of `function`, by name.

    directions: tangents for forward mode, gradients of outputs for reverse mode.
    """
    rest = {name: x for name, x in arguments.items() if name not in wrt}
    names = list(wrt)

    def call(*tensors):
        outputs = listed(function(**rest, **dict(zip(names, tensors, strict=True))))
        return tuple(out for out in outputs if out is not None)

    tensors = [arguments[name] for name in names]
    if transform == "func.grad":

        def total(*tensors):
            pairs = zip(call(*tensors), directions["seeds"], strict=True)
            return sum((out * seed.to(out.dtype)).sum() for out, seed in pairs)

        found = torch.func.grad(total, argnums=tuple(range(len(names))))(*tensors)
        return dict(zip(names, found, strict=True))
    if transform == "func.vmap":
        twice = [torch.stack([x, x]) for x in tensors]
        outputs = torch.func.vmap(call, randomness="same")(*twice)
        return {f"output {i}": out[1] for i, out in enumerate(outputs)}
    tangents = [directions[name].to(arguments[name].dtype) for name in names]
    if transform == "func.jvp":
        found = torch.func.jvp(call, tuple(tensors), tuple(tangents))[1]
        return {f"tangent {i}": x for i, x in enumerate(found)}
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(x, tangent)
            for x, tangent in zip(tensors, tangents, strict=True)
        ]
        found = [torch.autograd.forward_ad.unpack_dual(out).tangent for out in call(*duals)]
    return {f"tangent {i}": x for i, x in enumerate(found)}
