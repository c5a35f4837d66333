"""Declares an op once: its arguments, its outputs and its implementations.

    forward = Operator("l2norm", "Tensor x, float eps -> out", ...)
    backward = Backward(forward, "Tensor grad, Tensor x, float eps -> grad_x", ...)

The classes below derive the table of implementations, the torch operators with fake kernels, and
the gradient. They match arguments and results by name: the gradient of `x` is `grad_x`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

import torch

from npu_ops.core import ascendc as ascendc_kernels
from npu_ops.core import library, registry
from npu_ops.core.decisions import Decision, Decisions
from npu_ops.core.registry import Implementation, Table, Verdict, from_module, from_native

Tensors = torch.Tensor | tuple[torch.Tensor | None, ...]
WhyNot = Callable[[NamedTuple], str | None]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a torch schema, e.g. `Tensor? bias`."""

    type: str
    name: str

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")

    @property
    def is_optional(self) -> bool:
        return self.type.endswith("?")

    @property
    def is_written(self) -> bool:
        return "!" in self.type

    def written(self, alias: str) -> str:
        """Return the schema text of this argument as one that is written to."""
        return f"Tensor({alias}!){'?' if self.is_optional else ''} {self.name}"

    def __str__(self):
        return f"{self.type} {self.name}"


class Operator:
    """A torch operator that allocates its outputs and lets an implementation write them.

    Calling it calls the torch operator once. An output that the caller does not want is returned
    as a tensor without elements.

    Args:
        name: name of the operator.
        op: its folder in npu_ops/ops; the default is `name`.
        signature: inputs of the implementations in torch's schema syntax, tensors first; a
            `Tensor(a!)` is written in place. After the arrow: names of the outputs; one with a `?`
            may be None.
        shapes: further inputs, same syntax. Implementations do not get them; only shapes and dtypes
            of the outputs depend on them.
        new: makes the outputs, uninitialised, from a NamedTuple of all inputs.
        reference: computes the outputs from the implementations' inputs.
        lay_out: arranges the arguments for kernels. Either a function of a NamedTuple of them that
            returns them all, or functions of single arguments, by name. The default makes every
            input contiguous.
        why_not: implementation name -> function that returns why it does not support a call, beyond
            the common checks. Called with a NamedTuple of the implementations' arguments.
        groups: argument name -> NamedTuple type. Implementations get the fields of the type as one
            argument of that name. The fields must follow each other in the signature.
        is_empty: whether a call needs no kernel, from a NamedTuple of the implementations'
            arguments; by default, whether its first output has no elements.
        empty: writes the outputs of a call without a kernel; the default writes zeros, because a
            sum over nothing is 0.
        zeroed: whether to zero the outputs before a kernel runs, from a NamedTuple of all inputs.
            Needed if kernels skip elements, e.g. tokens after the last sequence.
        check_indices: raises ValueError for invalid index values in host memory, from a NamedTuple
            of the implementations' arguments, before any implementation runs.
        aclnn: torch_npu has operators for the op, and the op's `aclnn.py` calls them. "first": they
            come before all other implementations. "behind": they come after our kernels, so
            NPU_OPS_IMPL or a table of `npu-ops tune` must choose them.
        fla_npu: fla_npu has an operator for the op, and the op's `fla_npu.py` calls it. It is the
            last of the NPU implementations.
        ascendc: the op has an AscendC kernel and a native launcher of it. The Triton kernel comes
            first, because this machine's own compiler compiles the Triton kernel.
        cpu_in_python: the CPU implementation is in the op's `cpu.py`, not in the native library.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        *,
        new: Callable[[NamedTuple], Tensors],
        reference: Callable[..., Tensors],
        shapes: str = "",
        op: str | None = None,
        lay_out: Callable[[NamedTuple], Sequence] | Mapping[str, Callable] | None = None,
        why_not: Mapping[str, WhyNot] | None = None,
        groups: Mapping[str, type] | None = None,
        is_empty: Callable[[NamedTuple], bool] | None = None,
        empty: Callable[[NamedTuple], None] | None = None,
        zeroed: Callable[[NamedTuple], bool] | None = None,
        check_indices: Callable[[NamedTuple], None] | None = None,
        aclnn: Literal["first", "behind"] | None = None,
        fla_npu: bool = False,
        ascendc: bool = False,
        cpu_in_python: bool = False,
    ):
        self.name, self.op = name, op or name
        self.shared = {
            "lay_out": lay_out, "why_not": why_not, "groups": groups, "is_empty": is_empty,
            "check_indices": check_indices, "ascendc": ascendc, "cpu_in_python": cpu_in_python,
        }  # fmt: skip
        takes, writes = signature.split(" -> ")
        self.takes, self.shapes = _parsed(takes), _parsed(shapes)
        self.writes = [Argument("Tensor?" if n[-1] == "?" else "Tensor", n.rstrip("?"))
                       for n in writes.split(", ")]  # fmt: skip
        self.inputs = [*self.takes, *self.shapes]
        self.Inputs = _named("Inputs", self.inputs)
        self._grouped = _grouped(self.takes, groups) if groups else None
        reads = list(self._grouped or [argument.name for argument in self.takes])
        self._reads = len(reads)
        outputs = [output.name for output in self.writes]
        self.Arguments = collections.namedtuple("Arguments", reads + outputs)
        self.new, self.reference = new, reference
        self.lay_out = lay_out if callable(lay_out) else self._layout_of_each(lay_out)
        self._is_empty = is_empty or self._has_no_elements
        self._empty = empty or self._zeros
        self._zeroed = zeroed
        self._check_indices = check_indices
        self._overwritten = [i for i, a in enumerate(self.takes) if a.is_written]
        self._tensors = sum(argument.is_tensor for argument in self.inputs)
        self._decisions = Decisions(self._tensors)
        arguments = [argument.name for argument in (*self.takes, *self.writes)]
        written = [*(a.name for a in self.takes if a.is_written), *outputs]
        usual = self._usual(why_not or {}, aclnn, fla_npu, ascendc, cpu_in_python)
        self.table = Table(name, usual, arguments, written, self.op)
        self._call = library.operator(self._schema(), self.run, self._fake)

    def __call__(self, *inputs):
        return self._call(*inputs)

    def run(self, *inputs):
        """Compute the outputs on any device; this is the kernel that torch's dispatcher calls."""
        key = self._decisions.key(inputs)
        decision = self._decisions.find(key)
        outputs = self._run(inputs, key) if decision is None else self._repeat(inputs, decision)
        return self._returned(inputs, outputs)

    def _run(self, inputs: tuple, key: tuple) -> Sequence:
        inputs = self.Inputs(*inputs)
        outputs = _tuple(self.new(inputs))
        if library.poison_outputs:
            _poison(outputs)
        arguments = self._arguments(inputs, outputs)
        self.check_host_indices(arguments)
        zeroed = self._zeroed is not None and self._zeroed(inputs)
        if zeroed:
            self._zeros(arguments)
        if self._is_empty(arguments):
            self._empty(arguments)
            return outputs
        laid = tuple(self.lay_out(arguments))
        chosen = self.table.select(*laid)
        self._launch(chosen, laid, inputs)
        if not zeroed and self.table.always_chooses(chosen, laid):
            self._decisions.keep(key, chosen, inputs, outputs, laid)
        return outputs

    def _repeat(self, inputs: tuple, decision: Decision) -> Sequence:
        """Run a call by the cached decision for its key."""
        outputs = decision.outputs()
        if library.poison_outputs:
            _poison(outputs)
        if self._check_indices and inputs[0].device.type == "cpu":
            self._check_indices(self._arguments(self.Inputs(*inputs), outputs))
        laid = decision.arguments((*inputs[: self._tensors], *outputs))
        self._launch(decision.implementation, laid, inputs)
        return outputs

    def _launch(self, implementation: Implementation, laid: tuple, inputs: tuple) -> None:
        self.table.launch(implementation, laid)
        if self._overwritten:
            library.written(*self._given(inputs, self._overwritten))

    def check_host_indices(self, arguments) -> None:
        """Raise ValueError for invalid index values in host memory; do not read a device."""
        if self._check_indices and arguments[0].device.type == "cpu":
            self._check_indices(arguments)

    def explain(self, *inputs) -> list[Verdict]:
        """Return a Verdict per implementation, see `Table.explain`, for these inputs."""
        inputs = self.Inputs(*inputs)
        arguments = self._arguments(inputs, _tuple(self.new(inputs)))
        self.check_host_indices(arguments)
        return self.table.explain(*self.lay_out(arguments))

    @staticmethod
    def _given(inputs, places) -> list[torch.Tensor]:
        return [inputs[i] for i in places if inputs[i] is not None]

    def _arguments(self, inputs, outputs):
        if self._grouped:
            return self.Arguments(*(take(inputs) for take in self._grouped.values()), *outputs)
        return self.Arguments(*inputs[: self._reads], *outputs)

    def _schema(self) -> str:
        results = ", ".join(["Tensor"] * len(self.writes))
        return f"{self.name}({_text(self.inputs)}) -> ({results})"

    def _fake(self, *inputs):
        inputs = self.Inputs(*inputs)
        return self._returned(inputs, _tuple(self.new(inputs)))

    def _returned(self, inputs, outputs):
        """Return the outputs as a torch operator must: None becomes an empty tensor."""
        if len(outputs) == 1:
            return outputs[0]
        like = inputs[0]
        return tuple([like.new_empty(0) if output is None else output for output in outputs])

    def _layout_of_each(self, functions: Mapping[str, Callable] | None):
        if functions is None:
            functions = {a.name: torch.Tensor.contiguous for a in self.takes if a.is_tensor}
        fields = self.Arguments._fields
        chosen = [(fields.index(name), f) for name, f in functions.items() if name in fields]

        def lay_out(arguments):
            laid = list(arguments)
            for i, function in chosen:
                laid[i] = None if laid[i] is None else function(laid[i])
            return laid

        return lay_out

    def _has_no_elements(self, arguments):
        return not arguments[self._reads].numel()

    def _zeros(self, arguments):
        for output in arguments[self._reads :]:
            if output is not None:
                output.zero_()

    def _by_reference(self, *arguments):
        """Run the reference as an implementation: copy its results into the outputs."""
        found = _tuple(self.reference(*arguments[: self._reads]))
        for output, value in zip(arguments[self._reads :], found, strict=True):
            if output is not None:
                output.copy_(value)

    def _usual(
        self,
        why_not: Mapping[str, WhyNot],
        aclnn: str | None,
        has_fla_npu: bool,
        has_ascendc: bool,
        cpu_in_python: bool,
    ) -> list[Implementation]:
        """Return the implementations every op has (Triton, CPU, reference) and the optional
        ones."""
        folder = f"npu_ops.ops.{self.op}"
        arguments = f"{_text(self.takes)}, {self._written()}"
        schema = f"{self.name}_cpu({arguments}) -> ()"

        def usual(name, devices, missing=_nothing, dtypes=library.dtype_why_not, load=None):
            own = why_not.get(name)

            def against(*arguments):
                said = missing(arguments[0]) or dtypes(*arguments)
                return said or (own and own(self.Arguments(*arguments)))

            load = load or from_module(f"{folder}.{name}:{self.name}")
            return Implementation(name, load, frozenset(devices), against)

        of_vendor = usual("aclnn", {"npu"}, dtypes=_nothing)
        of_fla_npu = usual("fla_npu", {"npu"}, dtypes=_nothing)
        launcher = ascendc_kernels.launcher(self.op, self.name, arguments) if has_ascendc else None
        missing = functools.partial(ascendc_kernels.why_not, self.op)
        native = usual("ascendc", {"npu"}, lambda x: missing(x.device), load=launcher)
        cpu = usual("cpu", {"cpu"})
        if not cpu_in_python:
            load = from_native(schema)
            cpu = usual("cpu", {"cpu"}, lambda _: library.native_why_not(), load=load)
        return [
            *([of_vendor] if aclnn == "first" else []),
            usual("triton_ascend", {"npu", "cuda"}, lambda _: library.triton_why_not()),
            *([native] if has_ascendc else []),
            *([of_vendor] if aclnn == "behind" else []),
            *([of_fla_npu] if has_fla_npu else []),
            cpu,
            registry.reference(self._named_reference()),
        ]

    def _written(self) -> str:
        """Return the schema text of the outputs as written arguments of a kernel.

        Each gets an alias letter that no input uses.
        """
        taken = _text(self.takes)
        free = (letter for letter in string.ascii_lowercase if f"({letter}!)" not in taken)
        return ", ".join(a.written(alias) for a, alias in zip(self.writes, free, strict=False))

    def _named_reference(self) -> Callable[..., None]:
        """Return `_by_reference` with a signature that names its arguments, for reports."""

        def by_reference(*arguments):
            self._by_reference(*arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = self.Arguments._fields
        by_reference.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        return by_reference


class InPlace:
    """An operator that writes its outputs over its inputs. The operator's name ends with a `_`.

    Args:
        forward: the operator whose in-place form this is.
        over: output name -> name of the input it overwrites, e.g. {"out": "x"}.
        elementwise: True if kernels read each element before they overwrite it, see `memory.apart`.
    """

    def __init__(self, forward: Operator, over: Mapping[str, str], elementwise: bool = False):
        self.forward = forward
        self._over = [forward.Arguments._fields.index(over[out.name]) for out in forward.writes]
        schema = f"{forward.name}_({self._written()}) -> ()"
        self._call = library.operator(schema, self.run, lambda *inputs: None, elementwise)

    def __call__(self, *inputs) -> None:
        self._call(*inputs)

    def run(self, *inputs) -> None:
        targets = [inputs[i] for i in self._over]
        if not any(target.numel() for target in targets):
            return
        given = self.forward.Arguments(*inputs, *targets)
        self.forward.check_host_indices(given)
        arguments = list(self.forward.lay_out(given))
        for i, target in zip(self._over, targets, strict=True):
            arguments[i] = target  # the target itself: the laid-out argument may be a copy
        arguments[len(inputs) :] = targets
        self.forward.table.run(*arguments)
        library.written(*targets)

    def _written(self) -> str:
        aliases = dict(zip(self._over, "abcdefgh", strict=False))
        takes = enumerate(self.forward.takes)
        return ", ".join(a.written(aliases[i]) if i in aliases else str(a) for i, a in takes)


class Backward(Operator):
    """The gradient of `forward`, itself a torch operator.

    Its signature may name:
    - `grad_<output>` for each output of the forward, or `grad` if there is only one;
    - inputs and outputs of the forward, which are saved for the backward;
    - `needs_<input>`: whether that input's gradient is wanted.

    It writes `grad_<input>`, which is returned in the input's dtype. It has no gradient itself.

    If an output is unused, the backward gets this as its gradient:
    - zeros, if the signature declares the gradient as `Tensor`;
    - None, if it declares `Tensor?` and the output is not optional;
    - for `Tensor?` and an optional output: None if the forward did not return the output, else
      zeros.

    Args:
        passed: input name -> name of an output or of another input, whose gradient is also the
            gradient of this input.
        Otherwise as `Operator`; lay_out, why_not, groups, is_empty, check_indices, ascendc and
        cpu_in_python default to the forward's.
    """

    def __init__(
        self,
        forward: Operator,
        signature: str,
        *,
        passed: Mapping[str, str] | None = None,
        **declared,
    ):
        declared = forward.shared | declared
        super().__init__(f"{forward.name}_backward", signature, op=forward.op, **declared)
        outputs = [output.name for output in forward.writes]
        gradients = ["grad"] if len(outputs) == 1 else [f"grad_{name}" for name in outputs]
        known = [*(argument.name for argument in forward.inputs), *outputs]
        kept = [argument for argument in self.inputs if argument.name not in gradients]
        self._kept_tensors = [known.index(a.name) for a in kept if a.is_tensor]
        settings = [argument.name for argument in kept if not argument.is_tensor]
        needs = [name for name in settings if name.startswith("needs_")]
        self._needs = [known.index(name.removeprefix("needs_")) for name in needs]
        self._kept_settings = [known.index(name) for name in settings if name not in needs]
        # `_gradients` collects values in the order of `given`; `_order` picks the arguments.
        kept = [known[i] for i in self._kept_tensors + self._kept_settings]
        given = [*gradients, *kept, *needs]
        self._order = [given.index(argument.name) for argument in self.inputs]
        optional = {argument.name for argument in self.takes if argument.is_optional}
        # For each output: whether its gradient may be None, whether the output itself may be None.
        self._may_be_none = [
            (name in optional, output.is_optional)
            for name, output in zip(gradients, forward.writes, strict=True)
        ]
        self._found = self._sources(forward, dict(passed or {}), outputs)
        library.differentiable(forward.name, self._gradients, self._save)
        library.differentiable(self.name, library.no_gradient(self.name))

    def _sources(self, forward, passed: dict[str, str], outputs: list[str]) -> list[int | None]:
        """Return for each forward input the index of its gradient, or None.

        The index counts the backward's outputs, then the gradients of the forward's outputs.
        """
        written = [argument.name for argument in self.writes]
        sources = {name.removeprefix("grad_"): i for i, name in enumerate(written)}
        of_outputs = {name: len(written) + i for i, name in enumerate(outputs)}
        sources |= {name: (of_outputs | sources)[of] for name, of in passed.items()}
        return [sources.get(argument.name) for argument in forward.inputs]

    def _save(self, ctx, inputs, output):
        known = (*inputs, *_tuple(output))
        ctx.save_for_backward(*[known[i] for i in self._kept_tensors])
        ctx.set_materialize_grads(False)
        ctx.settings = [known[i] for i in self._kept_settings]
        ctx.dtypes = [getattr(x, "dtype", None) for x in inputs]
        ctx.outputs = [(x.shape, x.dtype, x.device) for x in _tuple(output)]

    def _gradients(self, ctx, *grads):
        given_back = zip(grads, ctx.outputs, self._may_be_none, strict=True)
        grads = [_present(*one) for one in given_back]
        needed = ctx.needs_input_grad  # each access makes a new tuple
        needs = [needed[i] for i in self._needs]
        given = (*grads, *ctx.saved_tensors, *ctx.settings, *needs)
        found = (*_tuple(self(*[given[i] for i in self._order])), *grads)
        inputs = zip(self._found, ctx.dtypes, needed)  # noqa: B905
        return tuple([
            found[source].to(dtype) if wanted and source is not None and dtype else None
            for source, dtype, wanted in inputs
        ])  # fmt: skip


def _parsed(schema: str) -> list[Argument]:
    return [Argument(*text.split()) for text in schema.split(", ") if text]


def _text(arguments: Sequence[Argument]) -> str:
    return ", ".join(map(str, arguments))


def _grouped(arguments: Sequence[Argument], groups: Mapping[str, type]) -> dict[str, Callable]:
    """Return functions that pick each of the implementations' arguments from the inputs, by
    name."""
    owner = {field: name for name, group in groups.items() for field in group._fields}
    places = {}
    for i, argument in enumerate(arguments):
        places.setdefault(owner.get(argument.name, argument.name), []).append(i)
    return {
        name: _group_at(groups[name], at) if name in groups else itemgetter(*at)
        for name, at in places.items()
    }


def _group_at(group: type, places: list[int]) -> Callable:
    span = slice(places[0], places[-1] + 1)
    return lambda inputs: group(*inputs[span])


def _named(name: str, arguments: Sequence[Argument]):
    return collections.namedtuple(name, [argument.name for argument in arguments])


def _tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _poison(outputs):
    for output in outputs:
        if output is not None:
            library.poisoned(output)


def _present(grad, output, may_be_none: tuple[bool, bool]):
    """Return the gradient of an output as the backward's argument: a tensor, zeros or None."""
    shape, dtype, device = output
    gradient_may, output_may = may_be_none
    if gradient_may and (shape == (0,) if output_may else grad is None):
        return None
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def _nothing(*arguments):
    return None
