"""Puts canaries (known bytes) around every tensor of a launch, to find writes out of bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from npu_ops.core.registry import Table, launched_by

MARGIN = 1 << 16  # bytes on each side, more than a tile
# Canary bytes. Beside read tensors: NaN in every floating dtype, so that a stray read changes the
# result. Beside written tensors: another value, because a NaN copied onto NaN would go unnoticed.
BESIDE_READ, BESIDE_WRITTEN = 0xFF, 0x5A


@contextlib.contextmanager
def guarded(found: list[str], note: Callable[[str], None]) -> Iterator[None]:
    """In a block, run every launch on copies with canaries around them.

    found: gets a sentence for each write beside a tensor, or to a tensor that is not an output.
    note: called before each launch.
    """
    launch = Table.launch

    def with_canaries(table: Table, chosen, args) -> None:
        note(table.op)
        copies = _Copies(table, args)
        launch(table, chosen, copies.args)
        found.extend(copies.findings())
        copies.copy_back()

    with launched_by(with_canaries):
        yield


@contextlib.contextmanager
def noted(note: Callable[[Table, tuple], None]) -> Iterator[None]:
    """In a block, call `note(table, arguments)` before each launch."""
    launch = Table.launch

    def noting(table: Table, chosen, args) -> None:
        note(table, args)
        launch(table, chosen, args)

    with launched_by(noting):
        yield


class _Copies:
    """Copies of a launch's arguments, in separate memory."""

    def __init__(self, table: Table, args: tuple):
        names = iter(table.arguments)
        self._op, self._writes = table.op, table.writes
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._memories: dict[tuple, _Memory] = {}
        _each(args, lambda value: self._list(next(names), value))
        for name, x in self._tensors:
            self._memory(x).add(name, x, name in self._writes)
        self.args = _each(args, self._copy)

    def _list(self, name: str, value):
        if isinstance(value, torch.Tensor):
            self._tensors.append((name, value))

    def _memory(self, x: torch.Tensor) -> _Memory:
        storage = x.untyped_storage()
        key = (str(x.device), storage.data_ptr() or id(x), storage.nbytes())
        return self._memories.setdefault(key, _Memory(x))

    def _copy(self, value):
        return self._memory(value).copy(value) if isinstance(value, torch.Tensor) else value

    def findings(self) -> list[str]:
        said = (memory.findings() for memory in self._memories.values())
        return [f"{self._op}: {sentence}" for sentences in said for sentence in sentences]

    def copy_back(self) -> None:
        for memory in self._memories.values():
            memory.copy_back()


def _each(args: tuple, function: Callable) -> tuple:
    """Apply `function` to each argument, and to each field of a named tuple."""
    return tuple(
        type(arg)(*map(function, arg)) if hasattr(arg, "_fields") else function(arg) for arg in args
    )


class _Memory:
    """A storage, its copy between canaries, and the tensors in it."""

    def __init__(self, x: torch.Tensor):
        self._original = _bytes(x)
        self._before = self._original.cpu()
        self._written: list[torch.Tensor] = []
        self._names: list[str] = []
        self._base: torch.Tensor | None = None

    def add(self, name: str, x: torch.Tensor, written: bool) -> None:
        self._names.append(name)
        if written:
            self._written.append(x)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        if self._base is None:
            canary = torch.full((MARGIN,), self._canary(), dtype=torch.uint8, device="cpu")
            self._base = torch.cat((canary, self._before, canary)).to(x.device)
        return _placed(self._base, x, MARGIN)

    def _canary(self) -> int:
        return BESIDE_WRITTEN if self._written else BESIDE_READ

    def findings(self) -> Iterator[str]:
        after, size, names = self._base.cpu(), self._before.numel(), ", ".join(self._names)
        for side, margin in (("before", after[:MARGIN]), ("behind", after[MARGIN + size :])):
            touched = (margin != self._canary()).nonzero()
            if touched.numel():
                furthest = MARGIN - touched[0] if side == "before" else touched[-1] + 1
                yield (
                    f"{touched.numel()} bytes {side} {names} were overwritten, up to "
                    f"{int(furthest)} bytes away"
                )
        changed = (after[MARGIN : MARGIN + size] != self._before).to(torch.uint8)
        for x in self._written:
            _placed(changed, x, 0).zero_()
        if changed.any():
            count = int(changed.sum())
            yield f"{count} bytes of the memory of {names} outside the outputs were overwritten"

    def copy_back(self) -> None:
        if self._written:
            self._original.copy_(self._base[MARGIN : MARGIN + self._before.numel()])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _placed(base: torch.Tensor, x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a tensor like `x` in the memory of `base`, moved by `offset` bytes."""
    empty = torch.empty(0, dtype=x.dtype, device=base.device)
    first = x.storage_offset() + offset // x.element_size()
    return empty.set_(base.untyped_storage(), first, x.shape, x.stride())
