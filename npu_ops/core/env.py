"""Reads and documents the environment variables that change how npu-ops runs.

The build (setup.py), the emulator and npu_ops_autoload.py read some variables themselves.
`python npu_ops/core/env.py` prints ENVS.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from npu_ops.core import epoch


@dataclasses.dataclass(frozen=True)
class Switch:
    """One environment variable: its parser, default, and text for ENVS.md."""

    variable: str
    field: str
    parse: Callable[[str], Any]
    default: str
    values: str
    meaning: str


def _implementations(text: str) -> dict[str, str]:
    """Parse `rope=reference,mrope=cpu` into {"rope": "reference", "mrope": "cpu"}."""
    chosen = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, separator, name = item.partition("=")
        if not (op and separator and name):
            raise ValueError(f"NPU_OPS_IMPL: got {item!r}, needs op=implementation")
        chosen[op] = name
    return chosen


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, (part.strip() for part in text.split(","))))


def _flag(variable: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text not in ("", "0", "1"):
            raise ValueError(f"{variable}: got {text!r}, needs 0 or 1")
        return text == "1"

    return parse


_MODES = {"0": "", "1": "tokens", "chunks": "chunks"}


def _consistent(text: str) -> str:
    if text and text not in _MODES:
        raise ValueError(f"NPU_OPS_CONSISTENT: got {text!r}, needs 0, 1 or chunks")
    return _MODES[text or "0"]


def _log_level(text: str) -> str:
    if text not in ("off", "once", "calls") and not _shadow(text):
        raise ValueError(f"NPU_OPS_LOG: got {text!r}, needs off, once, calls or shadow:N")
    return text


def _shadow(text: str) -> int:
    """Parse `shadow:100` as 100; return 0 for anything else."""
    name, _, number = text.partition(":")
    return int(number) if name == "shadow" and number.isascii() and number.isdigit() else 0


SWITCHES = (
    Switch(
        "NPU_OPS_IMPL",
        "impl",
        _implementations,
        "",
        "`op=implementation,...`",
        "Force an implementation, to bisect. It is an error if that implementation cannot run the "
        "call. Implementations: `ascendc`, `aclnn`, `fla_npu`, `triton_ascend`, `cpu`, "
        "`reference`.",
    ),
    Switch(
        "NPU_OPS_STRICT",
        "strict",
        _flag("NPU_OPS_STRICT"),
        "0",
        "`0`, `1`",
        "If kernels exist for the device of a call but none supports the call, npu-ops runs the "
        "PyTorch reference. `1`: it raises an error with the reasons instead.",
    ),
    Switch(
        "NPU_OPS_CONSISTENT",
        "consistent",
        _consistent,
        "0",
        "`0`, `1`, `chunks`",
        "A token has the same bits in training, in a prompt (whole or in pieces) and in decoding "
        "(docs/invariance.md). `1`: training and prompts compute token by token, as decoding does. "
        "`chunks`: decoding computes by chunks, as training does. Set it in the trainer and in the "
        "server.",
    ),
    Switch(
        "NPU_OPS_DISABLE",
        "disable",
        _names,
        "",
        "`op,...` or `all`",
        "Ops that the adapters leave to the framework. Direct calls of `npu_ops` still work.",
    ),
    Switch(
        "NPU_OPS_LOG",
        "log",
        _log_level,
        "once",
        "`off`, `once`, `calls`, `shadow:N`",
        "`once`: warn of each fallback and each refused patch, once. `calls`: also log every "
        "operator call at INFO, with shapes and the chosen implementation, before it runs, so that "
        "it survives a crash. `shadow:N`: also compute every Nth call of an op by its reference "
        "and log the error ratio at INFO, or as an error if it is too large; such a call is "
        "written to a file that `npu-ops replay FILE` computes again.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The parsed switches; see ENVS.md."""

    impl: dict[str, str]
    strict: bool
    consistent: str  # "", "tokens" or "chunks"
    disable: frozenset[str]
    log: str

    @property
    def consistent_as_set(self) -> str:
        """Return the text that NPU_OPS_CONSISTENT was set to: 0, 1 or chunks."""
        return next(text for text, mode in _MODES.items() if mode == self.consistent)

    @functools.cached_property
    def shadow(self) -> int:
        """Return N if every Nth call is compared with the reference; 0 if none is."""
        return _shadow(self.log)


def read(environ=os.environ) -> Settings:
    """Parse the switches.

    Raises:
        ValueError: a variable has an invalid value.
    """
    values = {s.field: s.parse(environ.get(s.variable, s.default)) for s in SWITCHES}
    return Settings(**values)


settings = read()


@contextlib.contextmanager
def override(**changes) -> Iterator[Settings]:
    """Change switches for a block, e.g. `override(impl={"rope": "reference"})`; for tests."""
    global settings
    before = settings
    settings = dataclasses.replace(before, **changes)
    epoch.advance()
    try:
        yield settings
    finally:
        settings = before
        epoch.advance()


def cache_folder(name: str) -> pathlib.Path | None:
    """Return the folder `name` in the user's npu_ops cache; None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return pathlib.Path(root or pathlib.Path.home() / ".cache") / "npu_ops" / name
    except RuntimeError:  # Path.home() found no home
        return None


def _row(switch: Switch) -> str:
    default = f"`{switch.default}`" if switch.default else "empty"
    return f"| `{switch.variable}` | {switch.values} | {default} | {switch.meaning} |"


def markdown() -> str:
    """Return the text of ENVS.md."""
    rows = "\n".join(map(_row, SWITCHES))
    return (
        "# Environment variables\n\n"
        "Generated from `npu_ops/core/env.py` by `python npu_ops/core/env.py`; do not edit.\n"
        "They are read once, when `npu_ops` is imported.\n\n"
        f"| variable | values | default | meaning |\n|---|---|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    print(markdown(), end="")
