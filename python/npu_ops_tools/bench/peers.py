"""Finds the peers: the implementations that npu-ops is timed against."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable

from npu_ops_tools import where

FETCHED = (where.find_clone() or where.ROOT) / ".cache"
MEGATRON = FETCHED / "megatron" / "0.16.1"
# fla's package needs a GPU on import; its files naive.py do not.
FLA_OPS = FETCHED / "frameworks/fla-core-0.6.0/fla/ops"


class Absent(Exception):
    """A peer cannot be timed here; the message says why."""


def megatron(module: str, name: str):
    """Return a function of the installed megatron-core, or else of the one `make demo` fetches.

    Raises:
        Absent: megatron-core or the function is missing.
    """
    if importlib.util.find_spec("megatron") is None:
        if not MEGATRON.is_dir():
            raise Absent("megatron-core is not installed; `make demo` fetches it")
        sys.path.append(str(MEGATRON))
    try:
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Absent(f"this megatron-core has no {module}.{name}: {error}") from error


def fla_naive(name: str, op: str = "gated_delta_rule"):
    """Return a function of flash-linear-attention's PyTorch reference of `op`.

    Raises:
        Absent: the reference was not fetched.
    """
    path = FLA_OPS / op / "naive.py"
    if not path.exists():
        raise Absent("not fetched; run python tests/adapters/fetch_frameworks.py fla-core-0.6.0")
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def untimed(why: str) -> Callable[[], Callable]:
    """Return a function that finds no peer: it always raises `Absent` with the message `why`."""

    def find():
        raise Absent(why)

    return find


ON_GPUS = untimed("its kernels run on GPUs alone; no benchmark calls them yet")
ON_NPUS = untimed("its operators run on NPUs alone; no benchmark calls them yet")
SGLANG = untimed("it needs other package versions than this environment has")
