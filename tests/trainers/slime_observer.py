"""What slime_site adds to modules of a stock slime or Relax once they have run."""

from __future__ import annotations

import os

import slime_train
import slime_worker


def stand_in(mindspeed) -> None:
    """For what MindSpeed's modules import, and is not here."""
    slime_worker.on_npu()


def record(logging_utils) -> None:
    logging_utils.log = lambda args, metrics, step_key: slime_worker.write(metrics)


def in_fp32(arguments) -> None:
    if os.environ.get("SLIME_DTYPE", "float32") != "float32":
        return
    name = "set_default_megatron_args"  # v0.2.2's
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
