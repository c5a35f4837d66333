"""Simulates one core executing a kernel: a scalar unit, which computes exactly, and its pipes.

Times are in microseconds since the program began. The scalar unit issues operations to pipes. A
pipe executes its operations in order; flags and barriers order the pipes among each other. Unknown
values are recorded, never guessed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

from npu_ops_tools.model import scalars, vector
from npu_ops_tools.model.costs import Costs
from npu_ops_tools.model.ir import BYTES, Function, Module, Operation, View, view_type

LOADS = {"load": "MTE2", "nd2nz": "MTE2", "store": "MTE3", "fixpipe": "FIX"}
FREE = {  # operations that cost nothing: at a kernel's start, or hints for the compiler
    "hivm.hir.set_mask_norm", "hivm.hir.set_ffts_base_addr", "hivm.hir.set_ctrl", "annotation.mark",
    "hivm.hir.set_mask_count", "hivm.hir.set_atomic",
}  # fmt: skip
LINE = 64  # bytes of one line of the scalar unit's cache
SURE = 8  # equal iterations in a row, after which the remaining ones are assumed to be equal


Load = Callable[[object, int], float | None]


def nothing(argument, offset: int) -> None:
    """A `Load` for which every value is unknown."""


@dataclasses.dataclass
class Span:
    """One operation of a pipe, from `start` to `end`."""

    pipe: str
    name: str
    start: float
    end: float


@dataclasses.dataclass
class Program:
    """The inputs of one program of a launch.

    arguments: the kernel's own, in order: numbers, or tensors for `load`.
    load: returns an element of an argument in global memory; None if it is unknown.
    """

    arguments: list
    grid: tuple[int, int, int]
    index: int
    load: Load = nothing


class Core:
    """The simulated state of one core."""

    def __init__(
        self,
        module: Module,
        function: Function,
        program: Program,
        costs: Costs,
        cores: int,
        sub_block: int = 0,
        spans: list[Span] | None = None,
    ):
        self.module, self.function, self.program = module, function, program
        self.costs, self.sub_block, self.spans = costs, sub_block, spans
        self.read, self.write = costs.read(cores), costs.write(cores)
        self.latencies = {"MTE2": costs.latency, "MTE3": costs.latency,
                          "FIX": costs.fixpipe_latency}  # fmt: skip
        self.handovers = self.latencies | {"MTE3": costs.handover}
        self.mixed = module.core == "mixed"
        self.now = 0.0
        self.free: dict[str, float] = collections.defaultdict(float)
        self.busy: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.flags: dict[tuple, collections.deque] = collections.defaultdict(collections.deque)
        self.unknown: collections.Counter[str] = collections.Counter()
        self.values: dict[str, object] = {}
        # A cube core sets a flag separately for each of its two vector cores.
        self.listeners = ("vector0", "vector1") if function.core == "cube" else ("",)
        self.assumed = False  # whether a condition that depends on vectors was assumed to be true
        self.loads = 0  # number of scalar loads that needed a value
        self.lines: set[tuple] = set()  # lines of global memory in the scalar unit's cache
        self._bind_arguments()

    def _bind_arguments(self) -> None:
        """Bind the arguments: three of the runtime, the kernel's own, then the grid."""
        given = [None, None, None, *self.program.arguments, *self.program.grid]
        arguments = self.function.arguments
        if len(given) != len(arguments):
            needs = len(arguments) - 6
            raise ValueError(f"arguments: got {len(given) - 6}, needs {needs}")
        for (name, kind), value in zip(arguments, given, strict=True):
            view = view_type(kind)
            self.values[name] = dataclasses.replace(view, argument=name) if view else value
        self.given = {name: value for (name, _), value in zip(arguments, given, strict=True)}

    def value(self, name: str):
        """Return the value of a name "%5" or a literal "5"."""
        return self.values.get(name) if name.startswith("%") else int(name)

    def operands(self, text: str) -> list:
        return [self.value(name) for name in _names(text)]

    @property
    def end(self) -> float:
        return max([self.now, *self.free.values()])

    def scalar(self, cycles: float) -> None:
        self.now += cycles / self.costs.clock
        self.busy["S"] += cycles / self.costs.clock

    def occupy(self, pipe: str, name: str, duration: float, after: float = 0.0) -> None:
        """Occupy a pipe, starting when both the pipe and the scalar unit are ready."""
        start = max(self.free[pipe], self.now, after)
        self.free[pipe] = start + duration
        self.busy[pipe] += duration
        if self.spans is not None:
            self.spans.append(Span(pipe, name, start, start + duration))

    def seen(self, pipe: str) -> float:
        """Return the time at which other pipes see a pipe's results."""
        return self._seen(pipe, self.latencies)

    def _seen(self, pipe: str, latencies: dict[str, float]) -> float:
        if pipe == "S":
            return self.now
        used = self.free[pipe] > 0
        return max(self.free[pipe] + (latencies.get(pipe, 0.0) if used else 0.0), self.now)

    def hold(self, pipe: str, time: float) -> None:
        """Block a pipe until `time`."""
        if pipe == "S":
            self.now = max(self.now, time)
        elif pipe == "ALL":
            self.now = max(self.now, time)
            for each in self.free:
                self.free[each] = max(self.free[each], time)
        else:
            self.free[pipe] = max(self.free[pipe], time)

    # Execution. Generators yield the flags of another core that they wait for: (flag, pipe).

    def run(self) -> Iterator[tuple]:
        yield from self._block(self.function.body)

    def _block(self, operations: list[Operation]) -> Iterator[tuple]:
        """Execute a block; return the values that it yields to the enclosing operation."""
        for operation in operations:
            if operation.name in REGIONS:
                yield from REGIONS[operation.name](self, operation)
            elif operation.name == "scf.yield":
                return self.operands(operation.text.partition(" : ")[0])
            elif operation.name == "scf.condition":
                return self.operands(operation.text.partition(" : ")[0])
            elif operation.name == "hivm.hir.sync_block_wait":
                yield self._other_cores_flag(operation)
            elif operation.regions:
                self.unknown[operation.name] += 1
            else:
                self._execute(operation)
        return []

    def _execute(self, operation: Operation) -> None:
        dialect, _, name = operation.name.rpartition(".")
        handler = HANDLERS.get(operation.name) or DIALECTS.get(dialect)
        if operation.name in FREE:
            return
        if handler is None:
            self.unknown[operation.name] += 1
            return
        handler(self, name, operation)

    def _set(self, operation: Operation, value) -> None:
        if operation.results:
            self.values[operation.results[0]] = value

    def _set_all(self, operation: Operation, values: list) -> None:
        self.values.update(zip(operation.results, values, strict=False))

    def _for(self, operation: Operation) -> Iterator[tuple]:
        self.scalar(2 * self.costs.scalar)
        head = operation.text
        index, *bounds = re.match(
            r"(%\w+) = (%[\w#-]+) to (%[\w#-]+) step (%[\w#-]+)", head
        ).groups()
        low, high, step = map(self.value, bounds)
        carried = re.search(r"iter_args\((.*?)\) ->", head)
        pairs = [pair.split(" = ") for pair in carried[1].split(", ")] if carried else []
        values = [self.value(start) for _, start in pairs]
        if None in (low, high, step):
            self.unknown["bounds of a loop"] += 1
            return
        count = max(0, -(-(high - low) // step))
        steady, done = Steady(self), 0
        while done < count:
            self.values[index] = low + done * step
            self.values.update(
                (name, value) for (name, _), value in zip(pairs, values, strict=True)
            )
            values = yield from self._block(operation.regions[0])
            self.scalar(2 * self.costs.scalar)
            done += 1
            skipped = steady.skip(values, count - done)
            values = steady.after(values, skipped)
            done += skipped
        self._set_all(operation, values)

    def _if(self, operation: Operation) -> Iterator[tuple]:
        self.scalar(2 * self.costs.scalar)
        condition = self.operands(operation.text)[0]
        if condition is None:
            self.unknown["condition of a branch"] += 1
            return
        regions = [*operation.regions, []]
        values = yield from self._block(regions[0] if condition else regions[1])
        self._set_all(operation, values)

    def _while(self, operation: Operation) -> Iterator[tuple]:
        pairs = re.search(r"^\((.*?)\) :", operation.text)
        pairs = [pair.split(" = ") for pair in pairs[1].split(", ")] if pairs else []
        values = [self.value(start) for _, start in pairs]
        names = [name for name, _ in pairs]
        before, after = operation.regions
        while True:
            self.values.update(zip(names, values, strict=True))
            condition, *values = yield from self._block(before)
            if condition is None:
                self.unknown["condition of a loop"] += 1
                return
            if not condition:
                self._set_all(operation, values)
                return
            values = yield from self._block(after)

    # The scalar unit.

    def _constant(self, name: str, operation: Operation) -> None:
        self._set(operation, scalars.constant(operation.text))

    def _arith(self, name: str, operation: Operation) -> None:
        slow = name.startswith(scalars.SLOW)
        self.scalar(self.costs.divide if slow else self.costs.scalar)
        if not scalars.knows(name):
            self.unknown[operation.name] += 1
            return
        operands = self.operands(operation.text.partition(" : ")[0])
        if name == "select" and operands[0] is None:
            self.assumed |= operands[1] != operands[2]
            operands[0] = True
        self._set(operation, scalars.arith(name, operation.text, operands))

    def _affine(self, name: str, operation: Operation) -> None:
        self.scalar(3 * self.costs.scalar)
        found = re.match(r"(#map\d*)\(", operation.text)
        operands = self.operands(operation.text)
        if None in operands:
            self._set(operation, None)
            return
        results = self.module.maps[found[1]](*operands)
        self._set(operation, {"apply": lambda x: x[0], "min": min, "max": max}[name](results))

    def _math(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.divide)
        self._set(operation, None)

    def _view(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.scalar)
        source = self.operands(operation.text)[0]
        made = scalars.view(name, operation.text, source, self.value) if source else None
        if made is None:
            self.unknown[operation.name] += 1
        self._set(operation, made)

    def _element(self, name: str, operation: Operation) -> None:
        """Execute a scalar load or store."""
        code = operation.text.partition(" : ")[0]
        source, inside = re.search(r"(%[\w#-]+)\[([^\]]*)\]", code).groups()
        view = self.value(source)
        if not isinstance(view, View):
            self.unknown[operation.name] += 1
            return
        parts = [view.offset, *map(_times, self.operands(inside), view.strides)]
        at = None if None in parts or not view.argument else sum(parts)
        if view.space == "gm" and not self._cached(view, at):
            self.hold("S", self.now + self.costs.scalar_load)
            self.busy["S"] += self.costs.scalar_load
            self.bytes["loaded" if name == "load" else "stored"] += BYTES[view.dtype]
        else:
            self.scalar(10 * self.costs.scalar)
        if name == "load":
            self._set(operation, self._loaded(view, at))

    def _cached(self, view: View, at: int | None) -> bool:
        """Return whether the scalar unit's cache has this element, and load its line."""
        if at is None:
            return False
        line = view.argument, int(at * BYTES[view.dtype]) // LINE
        known = line in self.lines
        self.lines.add(line)
        return known

    def _loaded(self, view: View, at: int | None):
        if at is None:
            return None
        self.loads += 1
        return self.program.load(self.given[view.argument], at)

    def _block_index(self, name: str, operation: Operation) -> None:
        which = {"get_block_idx": self.program.index, "get_sub_block_idx": self.sub_block,
                 "get_sub_block_num": 2}  # fmt: skip
        self._set(operation, which[name])

    def _pointer(self, name: str, operation: Operation) -> None:
        self._set(operation, view_type(operation.text))

    # Synchronization of pipes.

    def _set_flag(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.flag)
        first, second, event = self._flag(operation)
        self.flags[first, second, event].append(self.seen(first))

    def _wait_flag(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.flag)
        first, second, event = self._flag(operation)
        waiting = self.flags[first, second, event]
        if not waiting:
            self.unknown["a flag that is never set"] += 1
            return
        self.hold(second, waiting.popleft())

    def _flag(self, operation: Operation) -> tuple:
        first, second, event = _flag_parts(operation.text)
        return first, second, self.value(event)

    def _barrier(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.flag)
        if "PIPE_ALL" in operation.text:
            self.hold("ALL", max([self.now, *(self.seen(pipe) for pipe in self.free)]))

    def _set_other_cores_flag(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.issue)
        pipe, _, flag = self._block_flag(operation)
        time = self._seen(pipe, self.handovers) + self.costs.block_flag
        for other in self.listeners:
            self.flags["block", flag, other].append(time)

    def _other_cores_flag(self, operation: Operation) -> tuple:
        self.scalar(self.costs.issue)
        _, pipe, flag = self._block_flag(operation)
        return flag, pipe

    def _block_flag(self, operation: Operation) -> tuple:
        pattern = r"\[<\w+>, <PIPE_(\w+)>, <PIPE_(\w+)>\] flag = (%?[\w#-]+)"
        first, second, flag = re.match(pattern, operation.text).groups()
        return first, second, self.value(flag)

    # Operations that pipes execute.

    def _hivm(self, name: str, operation: Operation) -> None:
        self.scalar(self.costs.issue)
        text = operation.text
        ins, outs = _inside(text, "ins"), _inside(text, "outs")
        reads, writes = self.operands(ins), self.operands(outs)
        views = [each for each in (*reads, *writes) if isinstance(each, View)]
        if any(not view.known for view in views) and name != "mmadL1":
            outside = [view for view in views if view.space == "gm"]
            if not outside or not outside[0].known:
                self.unknown[f"sizes of {operation.name}"] += 1
                return
        if name == "mmadL1":
            self._matrix(operation, reads)
        elif name in LOADS or (name == "copy" and any(view.space == "gm" for view in views)):
            self._move(name, views)
        elif not vector.cost(self, name, text, reads, writes):
            self.unknown[f"{operation.name} of {'/'.join(v.dtype for v in views)}"] += 1

    def _move(self, name: str, views: list[View]) -> None:
        outside = next(view for view in views if view.space == "gm")
        pipe = LOADS.get(name) or ("MTE2" if views[0].space == "gm" else "MTE3")
        # the workspace in global memory, through which cube and vector cores pass data
        shared = not outside.argument or outside.offset is None
        count, run = outside.runs()
        rate = self._rate(pipe, name == "nd2nz", shared)
        cycles = max(outside.bytes / rate * self.costs.clock, count * self.costs.burst)
        kind = "workspace" if shared else "loaded" if pipe == "MTE2" else "stored"
        self.bytes[kind] += outside.bytes
        self.occupy(pipe, f"{name} {outside.bytes:.0f} B", cycles / self.costs.clock)

    def _rate(self, pipe: str, to_l1: bool, in_cache: bool) -> float:
        """Return the rate of a transfer.

        Data that cores pass to each other is in the cache. All vector cores share the bandwidth of
        other memory, so each gets less if more are active.
        """
        if pipe == "FIX":
            return self.costs.write_from_l0c
        if to_l1:
            return self.costs.cache_to_l1 if in_cache else self.costs.read_to_l1
        if in_cache:
            return self.costs.read_cache if pipe == "MTE2" else self.costs.write_cache
        return self.read if pipe == "MTE2" else self.write

    def _matrix(self, operation: Operation, reads: list) -> None:
        """Compute m x k by k x n: copies from L1 to L0 on MTE1, then the product on M."""
        m, k, n = reads[3:6]
        if None in (m, k, n):
            self.unknown["sizes of hivm.hir.mmadL1"] += 1
            return
        size = BYTES[reads[0].dtype]
        events = self.operands(_inside(operation.text, "sync_related_args"))
        for event in events[:2]:
            if event is not None and event >= 0 and self.flags["MTE2", "MTE1", event]:
                self.hold("MTE1", self.flags["MTE2", "MTE1", event].popleft())
        moved = m * k * size / self.costs.l1_to_l0a + k * n * size / self.costs.l1_to_l0b
        self.occupy("MTE1", f"{m}x{k}x{n}", moved)
        for event in events[2:4]:
            if event is not None and event >= 0:
                self.flags["MTE1", "MTE2", event].append(self.seen("MTE1"))
        cycles = -(-m // 16) * -(-n // 16) * -(-k * size // 32) * (2 if size == 4 else 1)
        self.bytes["products"] += m * k * n
        self.occupy("M", f"{m}x{k}x{n}", cycles / self.costs.clock, after=self.free["MTE1"])


class Steady:
    """Detects when a loop's iterations have become equal, and skips the remaining ones.

    Iterations are compared in pairs, because buffers alternate. They count as equal if four pairs
    in a row take the same time and bytes, all loop-carried values grow evenly, and no scalar load
    needed a value.
    """

    def __init__(self, core: Core):
        self.core, self.history, self.skipped = core, [], False

    def skip(self, values: list, left: int) -> int:
        """Skip some of the `left` iterations; return how many, an even number."""
        self.history.append((self.core.end, self.core.now, self.core.loads, dict(self.core.busy),
                             dict(self.core.bytes), list(values)))  # fmt: skip
        self.history = self.history[-SURE - 1 :]
        if self.skipped or left <= SURE or not self._alike():
            return 0
        self.skipped = True
        count = (left - SURE // 2) // 2 * 2
        self._advance(count)
        return count

    def after(self, values: list, skipped: int) -> list:
        if not skipped:
            return values
        before = self.history[-3][5]
        return [_advanced(a, b, skipped // 2) for a, b in zip(before, values, strict=True)]

    def _alike(self) -> bool:
        if len(self.history) <= SURE or self.core.spans is not None or self.core.mixed:
            return False
        pairs = list(zip(self.history[:-2:2], self.history[2::2], strict=True))
        times = [b[0] - a[0] for a, b in pairs]
        loads = {b[2] - a[2] for a, b in pairs}
        bytes_ = [{k: b[4][k] - a[4].get(k, 0) for k in b[4]} for a, b in pairs]
        carried = [_grown(a[5], b[5]) for a, b in pairs]
        even = max(times) - min(times) <= 1e-3 * max(times)
        same = all(each == bytes_[0] for each in bytes_) and all(c == carried[0] for c in carried)
        return even and same and loads == {0} and None not in carried

    def _advance(self, count: int) -> None:
        core, old, new = self.core, self.history[-3], self.history[-1]
        turns = count // 2
        time = (new[0] - old[0]) * turns
        core.now += time
        for pipe in core.free:
            core.free[pipe] += time
        for queue in core.flags.values():
            for i, value in enumerate(queue):
                queue[i] = value + time
        for counter, i in ((core.busy, 3), (core.bytes, 4)):
            for name, value in new[i].items():
                counter[name] += (value - old[i].get(name, 0)) * turns


def _grown(before: list, after: list) -> list | None:
    """Return the growth of loop-carried numbers; None if one is unknown or a view changed."""
    found = []
    for a, b in zip(before, after, strict=True):
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            found.append(b - a)
        elif a == b:
            found.append(0)
        else:
            return None
    return found


def _advanced(before, after, turns: int):
    return after + (after - before) * turns if isinstance(after, (int, float)) else after


def _times(a, b):
    return None if a is None or b is None else a * b


@functools.cache
def _flag_parts(text: str) -> tuple[str, str, str]:
    """Parse "[<PIPE_V>, <PIPE_MTE2>, <EVENT_ID0>]" or "[..., %58]": two pipes and an event."""
    pattern = r"\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|(%[\w#-]+))"
    first, second, event, name = re.match(pattern, text).groups()
    return first, second, event or name


@functools.cache
def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%[\w#-]+", text))


@functools.cache
def _inside(text: str, name: str) -> str:
    """Return the operands in "name(... : types)"."""
    _, found, rest = text.partition(f"{name}(")
    return rest.partition(" : ")[0] if found else ""


REGIONS = {"scf.for": Core._for, "scf.if": Core._if, "scf.while": Core._while}
DIALECTS = {"arith": Core._arith, "affine": Core._affine, "memref": Core._view,
            "math": Core._math, "hivm.hir": Core._hivm}  # fmt: skip
HANDLERS = {
    "arith.constant": Core._constant,
    "memref.load": Core._element,
    "memref.store": Core._element,
    "hivm.hir.pointer_cast": Core._pointer,
    "hivm.hir.get_block_idx": Core._block_index,
    "hivm.hir.get_sub_block_idx": Core._block_index,
    "hivm.hir.get_sub_block_num": Core._block_index,
    "hivm.hir.set_flag": Core._set_flag,
    "hivm.hir.wait_flag": Core._wait_flag,
    "hivm.hir.pipe_barrier": Core._barrier,
    "hivm.hir.sync_block_set": Core._set_other_cores_flag,
    "return": lambda core, name, operation: None,
}
