"""The gated delta rule by chunks: a backend in fla's registry, before all of fla's own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check, env
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_gated_delta_rule.arguments import check_call
from npu_ops_adapters.calls import check_device, inconsistent
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch

_Call = call_of(npu_ops.chunk_gated_delta_rule)
_POSITIONS = _Call._fields.index("cu_seqlens") + 1  # those that all versions of fla agree on
_OPERATION = "gated_delta_rule"
_REGISTRIES = "_operation_registries"  # of fla.backends, from 0.6 on


def patches() -> Iterable[Patch]:
    """An entry of what the registry holds, by the backend's name: fla cannot take one out."""
    yield Patch(
        target=f"{_registry()}._backends.npu_ops",
        op="chunk_gated_delta_rule",
        make=_backend,
        why="one kernel forward in place of six; and where Triton has no driver, it computes",
        signatures=(),
        versions=functions.VERSIONS,
        remove_when="fla takes backends from entry points",
        rebind=False,
        optional=True,
    )


def _registry() -> str:
    """Where it is; before fla's own backends are in it, where it was before 0.6."""
    registries = vars(sys.modules.get("fla.backends", object)).get(_REGISTRIES, {})
    if _OPERATION in registries:
        return f"fla.backends:{_REGISTRIES}.{_OPERATION}"
    return f"fla.ops.{_OPERATION}.backends:gdr_registry"


def _backend(original: None):
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise ValueError("FLA_DISABLE_BACKEND_DISPATCH=1: fla asks no backend")
    home = sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]

    class NpuOps(home.BaseBackend):
        """Below fla's, which are 0 and more: the lowest is asked first."""

        backend_type = "npu_ops"
        priority = -1

        def chunk_gated_delta_rule_verifier(self, *args, **kwargs):
            try:
                ours(*args, **kwargs)
            except (TypeError, ValueError) as reason:
                # With NPU_OPS_CONSISTENT the call itself has to raise: fla catches exceptions here,
                # so the verifier accepts.
                return bool(env.settings.consistent), str(reason)
            return True, None

        def chunk_gated_delta_rule(self, *args, **kwargs):
            try:
                call = ours(*args, **kwargs)
            except (TypeError, ValueError) as reason:
                raise inconsistent("chunk_gated_delta_rule", reason) from reason
            return call()

    return NpuOps()


def ours(*args, cp_context=None, transpose_state_layout=None, **options) -> Callable:
    """Return the npu-ops call for this call of fla, which has our arguments and the two named here.

    A_log and dt_bias may be given where they are not used. fla computes with an initial state of
    any float dtype in fp32, so a half is converted. How chunks lie in memory is fla's own affair.
    cp_context: of ranks with a span each; it says where sequences are, whatever cu_seqlens says.
    """
    if len(args) > _POSITIONS:
        raise TypeError(f"got {len(args)} positional arguments, needs {_POSITIONS} at most")
    call = functions.converted(_Call(*args, **options), transpose_state_layout)
    call = call._replace(cu_seqlens_cpu=None, chunk_indices=None)
    if cp_context is not None:
        check.floating("q", call.q)
        states = call.initial_state, call.output_final_state
        call = call._replace(**functions.shared(cp_context, call.q, *states))
    check_call(call)
    check_device(call.q)
    return functools.partial(npu_ops.chunk_gated_delta_rule, **call._asdict())
