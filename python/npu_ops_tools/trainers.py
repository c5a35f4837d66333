"""`npu-ops doctor --trainer NAME`: checks whether a trainer can run here.

It lists the trainer's installed packages, npu-ops' patches for it, and what would stop a run, in
the order of the run.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

from npu_ops.core.hardware import first_line
from npu_ops_tools import doctor


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer's requirements.

    needs: packages, in the order in which a run imports them.
    engines: rollout packages; one of them is needed.
    patched: top-level modules that npu-ops patches for the trainer.
    """

    needs: tuple[str, ...]
    engines: tuple[str, ...]
    patched: tuple[str, ...]


_MEGATRON = ("torch_npu", "ray", "megatron-core", "mindspeed", "transformers")
_PATCHED = ("megatron", "mindspeed", "transformers", "sglang")
TRAINERS = {
    "slime": Trainer((*_MEGATRON, "slime"), ("sglang",), ("slime", *_PATCHED)),
    "relax": Trainer((*_MEGATRON, "relax"), ("sglang",), ("relax", "mindspeed_bridge", *_PATCHED)),
    "verl": Trainer(
        ("torch_npu", "ray", "transformers", "verl"),
        ("vllm-ascend", "sglang"),
        ("verl", "transformers", "vllm", "vllm_ascend", "sglang", "megatron", "mindspeed"),
    ),
}


def collect(name: str) -> dict:
    """Return everything that `npu-ops doctor --trainer` shows, as plain data."""
    trainer = TRAINERS[name]
    broken = _import_mindspeed() if "mindspeed" in trainer.needs else None
    found = doctor.collect()
    rows = [row for row in found["patches"] if _is_for(trainer, row)]
    packages = {p: found["packages"][p] for p in (*trainer.needs, *trainer.engines)}
    return {
        "trainer": name,
        "packages": packages,
        "patches": [row for row in rows if row["state"] not in doctor.ABSENT],
        "stops": list(stops(trainer, found, rows, broken)),
    }


def stops(
    trainer: Trainer, found: dict, rows: list[dict], broken: str | None = None
) -> Iterator[str]:
    """Yield a sentence for each problem that would stop a run.

    found: the result of `doctor.collect`.
    rows: the patches for this trainer.
    broken: why MindSpeed does not import, or None. If it does not, the patches are not judged,
    because Megatron's state differs from that in a run.
    """
    first, *others = trainer.needs
    if not found["packages"][first]:
        yield f"{first} is not installed: {found['torch_npu']}"
    elif not found["machine"]["npu devices"]:
        yield f"torch finds no NPU: {found['machine']['no npu because'] or 'there is none'}"
    for problem in doctor.always_bad(found):
        yield f"{problem['what']}: {problem['fix']}"
    for package in others:
        if not found["packages"][package]:
            yield f"{package} is not installed"
    if not any(found["packages"][engine] for engine in trainer.engines):
        yield f"no rollout engine is installed: {' or '.join(trainer.engines)}"
    if broken:
        yield broken
        return
    for (package, reason), members in doctor.by_reason(rows).items():
        if members[0]["state"] not in doctor.AT_REST:
            yield f"{package} lacks the patches that this trainer needs: {reason}"


def _import_mindspeed() -> str | None:
    """Import MindSpeed as a run does; return why that fails, or None.

    A run imports it before Megatron, because it replaces Transformer Engine.
    """
    if not doctor.is_there("mindspeed"):
        return None
    try:
        importlib.import_module("mindspeed.megatron_adaptor")
    except Exception as error:  # a broken package may raise anything
        return f"mindspeed does not import: {type(error).__name__}: {first_line(error)}"
    return None


def text(found: dict) -> str:
    """Format the result of `collect`, at most 80 columns wide."""
    return "\n".join((*_installed(found), "", *_done(found), "", *_stopped(found)))


def _installed(found: dict) -> Iterator[str]:
    yield f"{found['trainer']} and its required packages"
    for package, version in found["packages"].items():
        yield f"  {package:20}{version or 'not installed'}"


def _done(found: dict) -> Iterator[str]:
    yield f"npu-ops changes for it: {len(found['patches'])} functions"
    for (package, reason), members in doctor.by_reason(found["patches"]).items():
        names = ", ".join(dict.fromkeys(row["op"] for row in members))
        yield from doctor.line("  ", f"{package}, {len(members)} ({reason}): {names}")


def _stopped(found: dict) -> Iterator[str]:
    if not found["stops"]:
        yield "npu-ops knows no problem that would stop it here"
        return
    yield "problems that would stop it here, in the order of a run"
    for number, sentence in enumerate(found["stops"], 1):
        yield from doctor.line(f"  {number}. ", sentence)


def _is_for(trainer: Trainer, row: dict) -> bool:
    return row["target"].partition(".")[0].partition(":")[0] in trainer.patched
