"""Dispatch: which implementation runs a call, and why the others do not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_ops.core import env, epoch, hardware, library, log, preferences, shadow
from npu_ops.core.collective import in_a_group

Launcher = Callable[..., None]
_OF_VENDOR = ("aclnn", "fla_npu")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    name: `ascendc`, `aclnn`, `fla_npu`, `triton_ascend`, `cpu` or `reference`.
    load: returns the function that runs the op; called when the implementation is first chosen.
    devices: the device types that the implementation is meant for; empty means any.
    why_not: called with the op's arguments; returns None, or one sentence for the user.
    """

    name: str
    load: Callable[[], Launcher]
    devices: frozenset[str]
    why_not: Callable[..., str | None]

    @functools.cached_property
    def launcher(self) -> Launcher:
        return self.load()


@contextlib.contextmanager
def launched_by(launch: Callable[[Table, Implementation, tuple], None]) -> Iterator[None]:
    """In a block, call `launch` in place of every implementation."""
    before, Table.launch = Table.launch, launch
    try:
        yield
    finally:
        Table.launch = before


def from_module(path: str) -> Callable[[], Launcher]:
    """Return a loader of "module:function" that imports the module only when it is called."""
    module, _, function = path.partition(":")
    return lambda: getattr(importlib.import_module(module), function)


def from_native(schema: str) -> Callable[[], Launcher]:
    """Return a loader of a native kernel. Defines its schema: the native library defines none."""
    name = library.define(schema)
    return lambda: getattr(torch.ops.npu_ops, name).default


def reference(run: Launcher) -> Implementation:
    """Make the last implementation of an op: plain PyTorch, on any device."""
    return Implementation("reference", lambda: run, frozenset(), lambda *args: None)


_assumed_device: str | None = None


@contextlib.contextmanager
def as_if_on(device: str) -> Iterator[None]:
    """In a block, choose implementations as if tensors were on `device`, to see what would run."""
    global _assumed_device
    before, _assumed_device = _assumed_device, device
    epoch.advance()
    try:
        yield
    finally:
        _assumed_device = before
        epoch.advance()


def _led_by(name: str | None, implementations: Sequence[Implementation]):
    """Return the implementations in order, but the one called `name` first."""
    return tuple(sorted(implementations, key=lambda i: i.name != name)) if name else implementations


def _device_type(args: tuple) -> str:
    return _assumed_device or args[0].device.type


class Table:
    """The ordered implementations of one op. The first one that supports a call runs it.

    arguments: argument names of the implementations, with groups expanded; tools use them in
    reports.
    writes: the arguments that are written.
    folder: name of the folder in npu_ops/ops that declares the op.
    """

    tables: dict[str, Table] = {}

    def __init__(
        self,
        op: str,
        implementations: Sequence[Implementation],
        arguments: Sequence[str] = (),
        writes: Sequence[str] = (),
        folder: str = "",
    ):
        if op in Table.tables:
            raise ValueError(f"op {op!r} is registered already")
        names = [i.name for i in implementations]
        if len(set(names)) != len(names):
            raise ValueError(f"op {op!r}: an implementation is registered twice in {names}")
        self.op, self.folder = op, folder or op
        self.implementations = tuple(implementations)
        self.arguments, self.writes = tuple(arguments), frozenset(writes)
        self._meant_for: dict[str, tuple[Implementation, ...]] = {}
        self._led: dict[tuple[str, str], tuple[Implementation, ...]] = {}
        Table.tables[op] = self
        preferences.implementations[op] = names

    @property
    def reference(self) -> Launcher:
        """Return the function of the op's reference."""
        return self.implementations[-1].launcher

    def run(self, *args) -> None:
        """Run the op on `args`; the first argument decides the device."""
        self.launch(self.select(*args), args)

    def launch(self, chosen: Implementation, args: tuple) -> None:
        """Run `args` with the chosen implementation, with the traces and checks of NPU_OPS_LOG."""
        settings = env.settings
        if settings.log == "calls":
            log.trace(f"{self.op}({_describe(args)}) -> {chosen.name}")
        if settings.shadow and shadow.due(self.op):
            shadow.run(self, chosen, args)
        else:
            chosen.launcher(*args)

    def select(self, *args) -> Implementation:
        """Return the implementation that runs `args`.

        Raises:
            RuntimeError: no implementation supports them, a forced one does not, or
                NPU_OPS_STRICT=1 and the call would fall back.
        """
        settings = env.settings
        forced = self._forced_name() if settings.impl else None
        return self._forced(forced, args) if forced else self._first(args)

    def always_chooses(self, chosen: Implementation, args: tuple) -> bool:
        """Return whether the choice of `chosen` can be cached for calls like `args`.

        False if NPU_OPS_IMPL is set, or if `chosen` or an implementation before it calls a vendor
        operator. The `why_not` of a vendor operator depends on graph capture and on where the
        tensors' memory begins.
        """
        if chosen.name in _OF_VENDOR or env.settings.impl:
            return False
        before = itertools.takewhile(lambda i: i is not chosen, self._in_order(args))
        return not any(implementation.name in _OF_VENDOR for implementation in before)

    def explain(self, *args) -> list[Verdict]:
        """Return a Verdict per implementation, in order: why it does not run `args`.

        The reason is None for the implementation that is chosen.
        """
        forced = self._forced_name()
        preferred = None if forced else self._preferred(_device_type(args), args)
        first = f"tuned, {preferred} comes first" if preferred else None
        chosen, verdicts = None, []
        for implementation in _led_by(preferred, self.implementations):
            reason = self._why_not(implementation, args)
            if reason is None and forced not in (None, implementation.name):
                reason = f"NPU_OPS_IMPL forces {forced}"
            elif reason is None and chosen:
                reason = first if chosen == preferred else f"{chosen} comes first"
            elif reason is None:
                chosen = implementation.name
            verdicts.append(Verdict(self.op, implementation.name, reason))
        return verdicts

    def _forced_name(self) -> str | None:
        """Return the implementation that NPU_OPS_IMPL forces, or None.

        A backward without an entry of its own follows its forward.
        """
        wanted = env.settings.impl
        return wanted.get(self.op) or wanted.get(self.op.removesuffix("_backward"))

    def _first(self, args: tuple) -> Implementation:
        declined = []
        for implementation in self._in_order(args):
            reason = implementation.why_not(*args)
            if reason is None:
                if declined and not implementation.devices:  # only a reference has no devices
                    self._fell_back(implementation.name, declined)
                return implementation
            declined.append(f"{implementation.name}: {reason}")
        device = _device_type(args)
        raise RuntimeError(f"{self.op}: no implementation runs on {device} ({'; '.join(declined)})")

    def _in_order(self, args: tuple) -> tuple[Implementation, ...]:
        """Return the implementations for the device, the tuned one first."""
        device = _device_type(args)
        preferred = self._preferred(device, args)
        if preferred is None:
            return self._meant_for.get(device) or self._candidates(device)
        return self._led.get((device, preferred)) or self._lead(device, preferred)

    def _candidates(self, device: str) -> tuple[Implementation, ...]:
        self._meant_for[device] = tuple(
            i for i in self.implementations if not i.devices or device in i.devices
        )
        return self._meant_for[device]

    def _preferred(self, device: str, args: tuple) -> str | None:
        """Return the implementation that `npu-ops tune` found fastest for such a call, or None."""
        if device not in preferences.settled and in_a_group():
            preferences.settle(device)
        mine = preferences.of(device).get(self.op)
        if mine is None or hardware.soc_is_assumed():
            return None
        of_class, bits = preferences.class_of(args)
        names = mine.get(of_class)
        return names and names[bits]

    def _lead(self, device: str, preferred: str) -> tuple[Implementation, ...]:
        led = self._led[device, preferred] = _led_by(preferred, self._candidates(device))
        return led

    def _forced(self, name: str, args: tuple) -> Implementation:
        for implementation in self.implementations:
            if implementation.name == name:
                reason = self._why_not(implementation, args)
                if reason is None:
                    return implementation
                raise RuntimeError(f"NPU_OPS_IMPL forces {self.op}={name}, but {reason}")
        known = ", ".join(i.name for i in self.implementations)
        raise RuntimeError(f"NPU_OPS_IMPL forces {self.op}={name}, needs one of {known}")

    def _fell_back(self, name: str, declined: list[str]) -> None:
        sentence = f"{self.op} falls back to {name} ({'; '.join(declined)})"
        if env.settings.strict:
            raise RuntimeError(f"NPU_OPS_STRICT=1: {sentence}")
        log.once(sentence)

    @staticmethod
    def _why_not(implementation: Implementation, args: tuple) -> str | None:
        device = _device_type(args)
        if implementation.devices and device not in implementation.devices:
            return (
                f"tensors are on {device}, it runs on {', '.join(sorted(implementation.devices))}"
            )
        return implementation.why_not(*args)


def check_forced() -> None:
    """Raise ValueError if NPU_OPS_IMPL names an unknown op or implementation."""
    for op, name in env.settings.impl.items():
        if op not in Table.tables:
            known = ", ".join(sorted(Table.tables))
            raise ValueError(f"NPU_OPS_IMPL: got the op {op!r}, needs one of {known}")
        names = [implementation.name for implementation in Table.tables[op].implementations]
        if name not in names:
            raise ValueError(f"NPU_OPS_IMPL: got {op}={name}, needs one of {', '.join(names)}")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One row of `explain`; `why_not` is None for the implementation that is chosen."""

    op: str
    implementation: str
    why_not: str | None


_explained: dict[str, tuple[object, Callable[..., tuple]]] = {}


def explains(function: str, table, arguments: Callable[..., tuple]) -> None:
    """Register `function`, so that `explain(function, ...)` calls `table.explain`.

    table: a Table or an Operator.
    arguments: converts the public function's arguments into those of `table.explain`.
    """
    if function in _explained:
        raise ValueError(f"{function!r} is registered already")
    _explained[function] = (table, arguments)


def explain(op, *args, **kwargs) -> list[Verdict]:
    """Return which implementation would run a call, and why not the others. Computes nothing.

    Args:
        op: a public function of npu_ops, or its name.
        args, kwargs: the arguments of that function.

    Returns:
        One `Verdict(op, implementation, why_not)` per implementation, in the order they are tried;
        `why_not` is None for the one that is chosen.

    Raises:
        ValueError: there is no such op, or the op itself would reject the arguments.
        TypeError: an argument is missing, or the op has none of that name.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _explained:
        raise ValueError(f"op: got {name!r}, needs one of {', '.join(sorted(_explained))}")
    table, arguments = _explained[name]
    public = getattr(sys.modules["npu_ops"], name, arguments)
    try:
        inspect.signature(public).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    args, kwargs = _without_memory((args, kwargs))
    return table.explain(*arguments(*args, **kwargs))


def _without_memory(values):
    """Replace floating tensors by fake ones, which have no memory. Index tensors stay readable."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor):
        return mode.from_tensor(tensor) if tensor.is_floating_point() else tensor

    return torch.utils._pytree.tree_map_only(torch.Tensor, fake, values)


def _describe(args: tuple) -> str:
    def one(arg):
        if isinstance(arg, torch.Tensor):
            return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}@{arg.device}"
        return repr(arg)

    return ", ".join(map(one, args))
