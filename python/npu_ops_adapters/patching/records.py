"""Defines what describes a patch and its state: Patch, State, Status, Statuses."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Callable
from typing import Any

import npu_ops  # noqa: F401  (registers the ops)
from npu_ops.core.registry import Table

Names = tuple[str, ...]

# Names of patches that NPU_OPS_DISABLE accepts, besides "all" and the names of npu-ops' operators.
NO_OPS = frozenset(
    {
        "bridge_deepstack",
        "bridge_missing_names",
        "bridge_nvtx",
        "bridge_process_groups",
        "checkpoint",
        "gated_delta_net",
        "gdn_decay",
        "gdn_gradients",
        "jit_fuser",
        "megatron_log_probs",
        "mindspeed",
        "relax_arguments",
        "relax_gated_delta_net",
        "relax_process_groups",
        "slime_accelerator",
        "slime_engine",
        "slime_log_probs",
        "slime_mindspeed",
        "slime_process_groups",
        "slime_provider",
        "slime_qwen3_5_vl",
        "slime_qwen3_next",
        "slime_ray",
        "split_qkv_rmsnorm_rope",
        "verl_log_probs",
        "verl_npu_patches",
        "vision_position",
    }
)


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement of a framework's function, class, method or value.

    target: "module:attribute", "module:Class.attribute" or "module:dict.key"; further dots nest.
    op: its name in NPU_OPS_DISABLE.
    make: called with the original; returns the replacement, which calls the original for
    unsupported calls.
    why: why the framework's own function is not good enough.
    signatures: parameter names of every known version. None among them: the attribute may be None.
    Empty: any signature is accepted.
    versions: versions of the framework that were tested.
    remove_when: the condition under which this patch can be removed.
    rebind: also replace it in modules that imported it by value (`from module import name`).
    optional: the attribute or key may be missing; `make` then gets None, and revert deletes it.
    also: modules that imported it by value. Needed if it is None or a bool, because the engine
    cannot find such values by identity.
    note: function that returns details of an applied patch, e.g. a count.
    by: name of the framework's registry that applies the patch; `adopt` then records it. "": the
    engine applies it.
    why_not: called with the original, or None; returns a reason to refuse the patch, or None.
    may_differ: the framework may have another function at this target. It then stays, and the state
    is KEPT instead of REFUSED. The reason is logged once in both states.
    joined, left: functions called after the patch is applied, and after it is reverted.
    """

    target: str
    op: str
    make: Callable[[Any], Any]
    why: str
    signatures: tuple[Names | None, ...]
    versions: str
    remove_when: str
    rebind: bool = True
    optional: bool = False
    also: Names = ()
    note: Callable[[], str] | None = None
    by: str = ""
    why_not: Callable[[Any], str | None] | None = None
    may_differ: bool = False
    joined: Callable[[], None] | None = None
    left: Callable[[], None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.target, self.op

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]


def known(name: str, where: str) -> None:
    """Raise ValueError unless NPU_OPS_DISABLE may contain `name`."""
    names = sorted(NO_OPS | {name for name in Table.tables if not name.endswith("_backward")})
    if name not in names:
        raise ValueError(f"{where}: got {name!r}, needs one of all, {', '.join(names)}")


class State(str, enum.Enum):
    """State of a patch; see the diagram in `npu_ops_adapters.patching`.

    `Status.sentence` begins with the value; `Status.detail` follows.
    """

    WAITING = "module not imported yet"
    DISABLED = "disabled by NPU_OPS_DISABLE"
    READY = "apply"
    LEFT = "left to"  # detail: the patch manager that applies it
    REFUSED = "refused"  # detail: the reason
    KEPT = "kept"  # detail: how the framework's function differs
    APPLIED = "applied"
    OVERWRITTEN = "overwritten by"  # detail: the object that is there now
    CAPTURED = "captured too early by"  # detail: the modules that hold the original
    REVERTED = "reverted"

    __str__ = str.__str__


@dataclasses.dataclass(frozen=True)
class Status:
    """State of one patch.

    detail: the reason or the cause; see `State`. note: details of an applied patch, e.g. a count.
    """

    target: str
    op: str
    state: State
    detail: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.target, self.op

    @property
    def sentence(self) -> str:
        """Return the state with its detail."""
        if not self.detail:
            return str(self.state)
        colon = ":" if self.state in (State.REFUSED, State.KEPT) else ""
        return f"{self.state}{colon} {self.detail}"


class Statuses(list[Status]):
    """A list of `Status` that prints as a table as wide as the terminal."""

    def __str__(self) -> str:
        from rich.console import Console  # imported here, not while a framework is being imported
        from rich.table import Table

        table = Table("target", "op", "state", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for row in self:
            table.add_row(row.target, row.op, "; ".join(filter(None, (row.sentence, row.note))))
        console = Console(file=io.StringIO(), color_system=None)
        console.print(table, markup=False)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
