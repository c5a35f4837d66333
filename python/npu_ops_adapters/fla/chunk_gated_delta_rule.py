"""Adds a backend for `chunk_gated_delta_rule` to fla's registry; fla asks it before its own."""

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
# number of positional arguments on which all versions of fla agree
_POSITIONS = _Call._fields.index("cu_seqlens") + 1
_OPERATION = "gated_delta_rule"
_REGISTRIES = "_operation_registries"  # name in fla.backends, from 0.6 on


def patches() -> Iterable[Patch]:
    """Add the backend to fla's registry. As a patch it can be removed again, unlike through fla."""
    yield Patch(
        target=f"{_registry()}._backends.npu_ops",
        op="chunk_gated_delta_rule",
        make=_backend,
        why="npu-ops launches one kernel forward, not six, and needs no Triton driver",
        signatures=(),
        versions=functions.VERSIONS,
        remove_when="fla takes backends from entry points",
        rebind=False,
        optional=True,
    )


def _registry() -> str:
    """Return the patch target of fla's backend registry, which fla 0.6 has moved and renamed.

    While fla 0.6 has not filled its registries yet, return the earlier name.
    """
    registries = vars(sys.modules.get("fla.backends", object)).get(_REGISTRIES, {})
    if _OPERATION in registries:
        return f"fla.backends:{_REGISTRIES}.{_OPERATION}"
    return f"fla.ops.{_OPERATION}.backends:gdr_registry"


def _backend(original: None):
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise ValueError("FLA_DISABLE_BACKEND_DISPATCH=1: fla calls no backend")
    home = sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]

    class NpuOps(home.BaseBackend):
        """Backend that fla asks first: lowest priority number first, and fla's are 0 or more."""

        backend_type = "npu_ops"
        priority = -1

        def chunk_gated_delta_rule_verifier(self, *args, **kwargs):
            try:
                ours(*args, **kwargs)
            except (TypeError, ValueError) as reason:
                # With NPU_OPS_CONSISTENT the verifier accepts every call: fla catches exceptions
                # here, so the error must come from the call itself.
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
    """Return a function that computes fla's call with npu-ops.

    fla's function has two arguments more than npu-ops': cp_context and transpose_state_layout.
    A_log and dt_bias are accepted even if no flag uses them. fla computes in fp32 with an initial
    state of any float dtype, so a half-precision state is converted. cu_seqlens_cpu and
    chunk_indices are ignored.

    cp_context: fla's context, in which each rank has one contiguous range of tokens. It overrides
    cu_seqlens.
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
