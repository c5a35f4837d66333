"""Compiles one kernel and reports on it. Reports without faults are cached on disk."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
import re
import tempfile
import time

from npu_ops_emulator import vendor

from npu_ops_tools.compile import hivm, masks
from npu_ops_tools.compile.hivm import LoopBody
from npu_ops_tools.compile.launches import Launch


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The compiler's result for a kernel.

    core: "vector", "cube" or "mixed".
    *_bytes: end of the highest buffer in that memory.
    scalar_loops: source lines of element-wise work that became a loop over single elements, which
    is far slower.
    unread_masks: loads and stores that move memory beyond their mask (masks.py). A load without a
    mask counts too if a select follows it.
    bodies: instructions and bytes of the kernel's body and of each loop.
    multi_buffer: whether loads and stores overlap with computation.
    notes: optimizations that the compiler dropped to make the kernel fit.
    seconds: compilation time; 0 if the report was cached.
    """

    kernel: str
    soc: str
    core: str
    ub_bytes: int
    l1_bytes: int
    l0a_bytes: int
    l0b_bytes: int
    l0c_bytes: int
    scalar_loops: tuple[str, ...]
    unread_masks: tuple[str, ...]
    bodies: tuple[LoopBody, ...]
    multi_buffer: bool
    notes: tuple[str, ...]
    seconds: float

    def total(self, field: str) -> int:
        """Return the sum of a `LoopBody` field over all bodies, each loop counted once."""
        return sum(getattr(body, field) for body in self.bodies)

    def faults(self) -> list[str]:
        """Return the faults of the compiled kernel, one phrase for each."""
        loops = collections.Counter(self.scalar_loops)
        found = [f"{count} scalar loop(s) at {source}" for source, count in loops.items()]
        if masks.STORE in self.unread_masks:
            found.append(masks.STORE)
        if not self.multi_buffer:
            found.append("multi-buffering was lost")
        return found + [f"compiler gave up: {note}" for note in self.notes]


def compile_kernel(kernel, signature: dict, constants: dict, *, soc=vendor.SOCS[0], **options):
    """Compile any @triton.jit kernel as a launch with these types and constants would.

    Args:
        kernel: the `@triton.jit` function.
        signature: argument name -> "*bf16", "i32", "fp32", ...
        constants: name of a constexpr -> value.
        soc: the SoC to compile for, see `SOCS`.
        options: of triton-ascend's launches, e.g. `multibuffer`.

    Returns:
        A `CompileReport`.

    Raises:
        CompileError: the kernel does not compile, e.g. for "ub overflow".
        FileNotFoundError: a tool is missing; the message says how to install it.
    """
    launch = Launch("", kernel, tuple(signature.items()), tuple(constants.items()))
    return compile_launch(launch, soc, **options)


def compile_launch(launch: Launch, soc: str = vendor.SOCS[0], **options) -> CompileReport:
    """Compile a recorded launch, as `compile_kernel` does."""
    options = dict(launch.options) | options
    text = vendor.lower(
        launch.kernel, dict(launch.signature), dict(launch.constants), soc, **options
    )
    kept = _folder() / f"{_key(text, soc, options)}.json"
    if kept.exists():
        return _read(kept)
    start = time.perf_counter()
    made, notes = vendor.compile(launch.name, text, soc, **options)
    seconds = round(time.perf_counter() - start, 2)
    report = _report(launch.name, soc, made, notes, tuple(masks.unread(text)), seconds)
    if not report.faults():  # a fault names a source line, which the next edit moves
        _write(kept, dataclasses.replace(report, seconds=0.0))
    return report


def _report(name: str, soc: str, made: str, notes: tuple, unread: tuple, seconds: float):
    memories = {f"{name}_bytes": size for name, size in hivm.on_chip_bytes(made).items()}
    return CompileReport(
        kernel=name,
        soc=soc,
        core=hivm.core(made),
        scalar_loops=tuple(hivm.scalar_loops(made)),
        unread_masks=unread,
        bodies=tuple(hivm.loop_bodies(made)),
        multi_buffer=hivm.keeps_multi_buffer(made, notes),
        notes=notes,
        seconds=seconds,
        **memories,
    )


def _key(text: str, soc: str, options: dict) -> str:
    """Return a cache key of the kernel, SoC, options, tools and of hivm.py, masks.py, vendor.py.

    Line numbers of the kernel are not part of it.
    """
    code = re.sub(r"\s*loc\((?:[^()]|\([^()]*\))*\)|^#loc.*$", "", text, flags=re.M)
    parts = (
        code,
        soc,
        str(options),
        vendor.versions(),
        inspect.getsource(hivm),
        inspect.getsource(masks),
        inspect.getsource(vendor),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base, "npu_ops", "compile")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(path: pathlib.Path) -> CompileReport:
    fields = json.loads(path.read_text())
    for name in ("scalar_loops", "unread_masks", "notes"):
        fields[name] = tuple(fields[name])
    fields["bodies"] = tuple(LoopBody(**body) for body in fields["bodies"])
    return CompileReport(**fields)


def _write(path: pathlib.Path, report: CompileReport) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(dataclasses.asdict(report), file)
    os.replace(file.name, path)  # atomic: another process may write the same file
