"""A stand-in for flash-linear-attention: its modules, signatures and registry, in two forms.

`write(folder, form)` writes a package `fla`. "main" is 0.5.2 and the main branch of August 2026;
"0.6" is the next release. Functions return ("theirs", their name). Registries behave like fla's.
main's registry is loaded at the first call, under a lock, and hides import errors. The backend with
the lowest priority number is asked first. A verifier that raises an exception declines the call.
"""

from __future__ import annotations

import pathlib

FORMS = ("main", "0.6")

_BACKEND = """
import os
DISABLED = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"

class BaseBackend:
    backend_type = "base"
    package_name = env_var = None
    priority = 5

    @classmethod
    def is_available(cls):
        return cls.package_name is None

    def is_enabled(self):
        return True

    def verify(self, name, *args, **kwargs):
        verifier = getattr(self, f"{name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)

class BackendRegistry:
    _registries = {}

    def __init__(self, name):
        self._backends, self._logged = {}, set()
        BackendRegistry._registries[name] = self

    def register(self, backend):
        self._backends[backend.backend_type] = backend

    def _get_sorted_backends(self):
        return sorted(self._backends.values(), key=lambda backend: backend.priority)

    def ask(self, function, *args, **kwargs):
        name = function.__name__
        for backend in self._get_sorted_backends():
            if not (backend.is_available() and backend.is_enabled()):
                continue
            accepted, reason = backend.verify(name, *args, **kwargs)
            if not accepted:
                self._logged.add(f"{name}:{backend.backend_type}: {reason}")
            elif getattr(backend, name, None) is not None:
                return getattr(backend, name)(*args, **kwargs)
        return function(*args, **kwargs)
"""

_DISPATCH = {
    "main": """
import contextlib, functools, threading
_initialized, _lock = set(), threading.Lock()

def _initialize(operation):
    with _lock:
        if operation not in _initialized:
            with contextlib.suppress(ImportError):
                __import__(f"fla.ops.{operation}.backends", fromlist=[""])
            _initialized.add(operation)

def dispatch(operation):
    def decorate(function):
        if DISABLED:
            return function
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            _initialize(operation)
            registry = BackendRegistry._registries.get(operation)
            return function(*args, **kwargs) if registry is None else (
                registry.ask(function, *args, **kwargs))
        return wrapper
    return decorate
""",
    "0.6": """
import functools, importlib
_operation_registries = {}

def _get(operation):
    return _operation_registries.setdefault(operation, BackendRegistry(operation)) \\
        if operation not in _operation_registries else _operation_registries[operation]

def register(operation):
    def decorate(backend):
        _get(operation).register(backend())
        return backend
    return decorate

def dispatch(operation):
    importlib.import_module(f"fla.ops.{operation}.backends")
    registry = _get(operation)
    def decorate(function):
        if DISABLED:
            return function
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return registry.ask(function, *args, **kwargs)
        return wrapper
    return decorate
""",
}

_GDR_BACKENDS = """
    backend_type, package_name, priority = "triton_ascend", "no_npu_here", 0

    def chunk_gated_delta_rule(self, *args, **kwargs):
        return "triton_ascend", "chunk_gated_delta_rule"
"""
_BACKENDS = {
    "main": f"""
from fla.ops.backends import BackendRegistry, BaseBackend
class TritonAscend(BaseBackend):{_GDR_BACKENDS}
gdr_registry = BackendRegistry("gated_delta_rule")
gdr_registry.register(TritonAscend())
""",
    "0.6": f"""
from fla.backends import BaseBackend, register
@register("gated_delta_rule")
class TritonAscend(BaseBackend):{_GDR_BACKENDS}
""",
}

_CHUNK = """
from {registry} import dispatch

@dispatch("gated_delta_rule")
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
        chunk_indices=None, cp_context=None, **kwargs):
    return "theirs", "chunk_gated_delta_rule"

chunk_gdn = chunk_gated_delta_rule
"""

_SIGNATURES = {
    "fused_recurrent_gated_delta_rule": (
        "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "state_v_first=False, cu_seqlens=None, **kwargs"
    ),
    "fused_gdn_gate": "g, A_log, dt_bias=None, output_dtype=None",
    "chunk_kda": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None{graph}, "
        "**kwargs"
    ),
    "fused_recurrent_kda": (
        "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, "
        "state_v_first=False, cu_seqlens=None, **kwargs"
    ),
    "chunk_gated_delta_product": (
        "q, k, v, g, beta, num_householder, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None"
    ),
    "l2norm": "x, eps=1e-6, output_dtype=None",
    "rms_norm_gated": (
        "x, g, weight, bias, activation='swish', residual=None, prenorm=False, "
        "residual_in_fp32=False, eps=1e-6"
    ),
    "rmsnorm_fn": "x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True",
    "causal_conv1d": (
        "x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
        "activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, "
        "chunk_indices=None, cp_context=None, **kwargs"
    ),
    "causal_conv1d_update": "x, cache, residual=None, weight=None, bias=None, activation=None",
}
_GDR = "fla.ops.gated_delta_rule"
MODULES = {  # function: its module
    "main": {
        "fused_recurrent_gated_delta_rule": f"{_GDR}.fused_recurrent",
        "fused_gdn_gate": f"{_GDR}.gate",
        "chunk_gated_delta_product": "fla.ops.gated_delta_product.chunk",
        "chunk_kda": "fla.ops.kda.chunk",
        "fused_recurrent_kda": "fla.ops.kda.fused_recurrent",
        "l2norm": "fla.modules.l2norm",
        "rms_norm_gated": "fla.modules.fused_norm_gate",
        "rmsnorm_fn": "fla.modules.layernorm_gated",
        "causal_conv1d": "fla.modules.conv.causal_conv1d",
        "causal_conv1d_update": "fla.modules.conv.triton.ops",
    },
    "0.6": {
        "fused_recurrent_gated_delta_rule": f"{_GDR}.fused_recurrent",
        "fused_gdn_gate": f"{_GDR}.gate",
        "chunk_gated_delta_product": "fla.ops.gated_delta_product.chunk",
        "chunk_kda": "fla.ops.kda.chunk",
        "fused_recurrent_kda": "fla.ops.kda.fused_recurrent",
        "l2norm": "fla.modules.norm.l2norm",
        "rms_norm_gated": "fla.modules.norm.fused_norm_gate",
        "rmsnorm_fn": "fla.modules.norm.layernorm_gated",
        "causal_conv1d": "fla.modules.causal_conv1d.ops",
        "causal_conv1d_update": "fla.modules.causal_conv1d.ops",
    },
}
_GRAPH = {"main": "", "0.6": ", use_graph=False, max_num_seqs=None"}
REGISTRY = {"main": "fla.ops.backends", "0.6": "fla.backends"}


def write(folder: pathlib.Path, form: str) -> None:
    modules = {
        REGISTRY[form]: _BACKEND + _DISPATCH[form],
        f"{_GDR}.backends": _BACKENDS[form],
        f"{_GDR}.chunk": _CHUNK.format(registry=REGISTRY[form]),
        "fla.layers": "",
    }
    for function, module in MODULES[form].items():
        takes = _SIGNATURES[function].replace("{graph}", _GRAPH[form])
        source = f"def {function}({takes}):\n    return 'theirs', '{function}'\n"
        modules[module] = modules.get(module, "") + source
        # imported by value, as in fla's layers
        modules["fla.layers"] += f"from {module} import {function}\n"
    modules["fla.layers"] += f"from {_GDR}.chunk import chunk_gated_delta_rule, chunk_gdn\n"
    for module, source in modules.items():
        path = folder / module.replace(".", "/")
        for parent in path.parents:
            if folder in parent.parents:
                parent.mkdir(parents=True, exist_ok=True)
                (parent / "__init__.py").touch()
        package = any(other.startswith(f"{module}.") for other in modules)
        path = path / "__init__.py" if package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
