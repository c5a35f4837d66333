"""Functions that slime_site calls after a module of an unchanged slime or Relax is imported."""

from __future__ import annotations

import os

import slime_train
import slime_worker


def stand_in(mindspeed) -> None:
    """Add stand-ins for modules that MindSpeed imports and this machine lacks."""
    slime_worker.on_npu()


def record(logging_utils) -> None:
    logging_utils.log = lambda args, metrics, step_key: slime_worker.write(metrics)


def in_fp32(arguments) -> None:
    if os.environ.get("SLIME_DTYPE", "float32") != "float32":
        return
    name = "set_default_megatron_args"  # its name in v0.2.2
    slime_train.in_fp32(arguments, f"_{name}" if hasattr(arguments, f"_{name}") else name)


def count(model) -> None:
    slime_worker.count()
    slime_worker.count_functions()


AFTER = {
    "mindspeed": stand_in,
    "relax.backends.megatron.arguments": in_fp32,
    "relax.backends.megatron.model": count,
    "relax.utils.tracking_utils": record,
    "slime.observability.logging_utils": record,
    "slime.utils.logging_utils": record,
    "slime.backends.megatron_utils.arguments": in_fp32,
    "slime.backends.megatron_utils.model": count,
}
