"""A patch, and where it stands."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Callable
from typing import Any

import npu_ops  # noqa: F401  (registers the ops)
from npu_ops.core.registry import Table

Names = tuple[str, ...]

# What NPU_OPS_DISABLE may name besides ops: what adapters replace that is no operator of npu_ops.
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
    """One replacement.

    target: "module:attribute", "module:Class.attribute" or "module:dict.key", dots going further
        in.
    op: what NPU_OPS_DISABLE calls it.
    make: called with what is there; returns what takes its place, and falls through to it.
    why: why the framework's own will not do.
    signatures: the names of the parameters in every version known; None among them: the attribute
        may be None. Empty: anything is replaced.
    versions: of the framework, that it was tested with.
    remove_when: when this patch can go.
    rebind: replace it also in modules that imported it by value.
    optional: the attribute or key may not be there; `make` is given None, and revert deletes it.
    also: modules that import it by value, for what cannot be recognised there: None or a bool.
    note: says more of an applied patch, e.g. a count.
    by: who applies it in this engine's place, and tells it by `adopt`; "" is the engine.
    why_not: called with what is there, or None; a sentence refuses the patch.
    may_differ: what is there may be another function, and is then kept, which is no fault.
    joined, left: called once it is applied, and once it is reverted.
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
    """Raise ValueError unless `name` is what NPU_OPS_DISABLE may say."""
    names = sorted(NO_OPS | {name for name in Table.tables if not name.endswith("_backward")})
    if name not in names:
        raise ValueError(f"{where}: got {name!r}, needs one of all, {', '.join(names)}")


class State(str, enum.Enum):
    """Where a patch stands; the diagram is in `npu_ops_adapters.patching`.

    A value is how `Status.sentence` begins; what follows it there is `Status.detail`.
    """

    WAITING = "module not imported yet"
    DISABLED = "disabled by NPU_OPS_DISABLE"
    READY = "apply"
    LEFT = "left to"  # detail: whose patch manager places it
    REFUSED = "refused"  # detail: why
    KEPT = "kept"  # detail: how the framework's function is another than ours
    APPLIED = "applied"
    OVERWRITTEN = "overwritten by"  # detail: what is there now
    CAPTURED = "captured too early by"  # detail: the modules that hold the original
    REVERTED = "reverted"

    __str__ = str.__str__


@dataclasses.dataclass(frozen=True)
class Status:
    """Where one patch stands.

    detail: the reason, or who; see `State`. note: more of an applied patch, e.g. a count.
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
        """The state with its detail."""
        if not self.detail:
            return str(self.state)
        colon = ":" if self.state in (State.REFUSED, State.KEPT) else ""
        return f"{self.state}{colon} {self.detail}"


class Statuses(list[Status]):
    """Printed, they are a table as wide as the terminal."""

    def __str__(self) -> str:
        from rich.console import Console  # not while a framework is imported
        from rich.table import Table

        table = Table("target", "op", "state", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for row in self:
            table.add_row(row.target, row.op, "; ".join(filter(None, (row.sentence, row.note))))
        console = Console(file=io.StringIO(), color_system=None)
        console.print(table, markup=False)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
