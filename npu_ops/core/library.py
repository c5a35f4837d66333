"""The torch library `npu_ops::` and the native kernels behind it.

Each op's `op.py` defines its schemas in Python, so an install without a compiler still has every
operator. The native library defines no schema. It only registers CPU kernels, and launchers of
AscendC kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Callable

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from npu_ops.core import log, memory

LIBRARY = torch.library.Library("npu_ops", "DEF")
_BUILD_INFO = pathlib.Path(__file__).parent.parent / "_build_info.json"
# Before torch 2.10 the C++ API is not a stable ABI: each release needs its own library, see
# setup.py.
_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
_NATIVE = "_native.abi3.so" if _TORCH >= (2, 10) else "_native_torch{}_{}.abi3.so".format(*_TORCH)
_REBUILD = (
    "`pip install --no-build-isolation --no-deps --force-reinstall --no-binary npu-ops npu-ops` "
    "builds it for this torch"
)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Tests set this to fill outputs with NaN first, which exposes elements that no kernel wrote.
poison_outputs = False


def dense_like(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return an uninitialised contiguous tensor of x's shape; None for None."""
    if x is None:
        return None
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def poisoned(out: torch.Tensor) -> torch.Tensor:
    """Return the uninitialised `out`, filled with NaN if `poison_outputs` is set."""
    return out.fill_(float("nan")) if poison_outputs else out


def written(*tensors: torch.Tensor) -> None:
    """Increment the version counters of tensors written in place, as autograd needs."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def define(schema: str) -> str:
    """Define `npu_ops::<schema>` and return its name. Raises if the name is already defined."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return schema.partition("(")[0]


def operator(schema: str, run, fake, elementwise: bool = False) -> Callable:
    """Define `npu_ops::<schema>` with its kernel and its fake kernel.

    This avoids `torch.library.custom_op`, which makes a call four times as expensive.

    Args:
        run: computes the outputs on any device.
        fake: makes outputs with the right shapes and dtypes, and computes nothing.
        elementwise: for an operator that writes to its arguments, see `memory.apart`.

    Returns:
        The function that calls the operator, see `caller`.
    """
    name = define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"npu_ops::{name}", _where_apart(name, fake, elementwise), lib=LIBRARY
    )
    return caller(name)


def caller(name: str) -> Callable:
    """Return a function that calls `npu_ops::<name>` through torch's dispatcher.

    If autograd does not record a call, the returned function skips the autograd kernel. That kernel
    is Python code and costs as much as the rest of the dispatcher.
    """
    overload = getattr(torch.ops.npu_ops, name).default

    def call(*inputs):
        if torch.compiler.is_compiling():
            return overload(*inputs)
        if _is_recorded(inputs):
            _refuse_tangents(name, inputs)
            return overload(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*inputs)

    return call


def _is_recorded(inputs: tuple) -> bool:
    """Return whether autograd or a torch.func transform may record a call with these inputs."""
    if is_transformed() or forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def differentiable(name: str, backward, save=None) -> None:
    """Register the gradient of an operator.

    This avoids `torch.library.register_autograd`: the transforms of `torch.func` reject its
    kernels.

    Args:
        name: name of the operator.
        backward: called with the context and the outputs' gradients; returns the inputs' gradients.
        save: called with the context, the inputs and the output; stores in the context what
            backward needs.
    """
    kernel = _autograd_kernel(name, backward, save or (lambda ctx, inputs, output: None))
    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _autograd_kernel(name: str, backward, save) -> Callable:
    """Make the kernel for dispatch key Autograd: it records a call, then calls the next kernel."""
    overload = getattr(torch.ops.npu_ops, name).default

    def below_autograd(keys, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx, *given):
        *inputs, (keys, transformed) = given
        # torch disables gradients here, but an outer transform needs the call below to be recorded.
        with torch.enable_grad() if transformed else contextlib.nullcontext():
            output = below_autograd(keys, inputs)
        save(ctx, inputs, output)
        return output

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *grads: (*backward(ctx, *grads), None)),
    }
    function = type(name, (torch.autograd.Function,), members)
    # Not `function.apply`: it would apply torch.func's transforms again, after the dispatcher did.
    record = super(torch.autograd.Function, function).apply

    def kernel(keys, *inputs):
        _refuse_tangents(name, inputs)
        if not (torch.is_grad_enabled() and _is_recorded(inputs)):
            return below_autograd(keys, inputs)
        if not is_transformed():
            return record(*inputs, (keys, False))
        with enable_single_level_autograd_function():
            return record(*inputs, (keys, True))

    return kernel


def _refuse_tangents(name: str, args: tuple) -> None:
    """Raise NotImplementedError for a forward-mode tangent: no operator has a jvp."""
    if forward_ad._current_level < 0:
        return
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tangent of forward-mode differentiation (jvp), needs reverse mode "
                "(vjp, grad, backward)"
            )


def _where_apart(name: str, fake, elementwise: bool):
    """Wrap `fake` so that an operator that writes to arguments first checks for shared memory.

    In a compiled call only the fake kernel sees the caller's memory: the compiler replaces tensors
    that share memory by separate ones.
    """
    arguments = getattr(torch.ops.npu_ops, name).default._schema.arguments
    names = [argument.name for argument in arguments]
    changed = [argument.name for argument in arguments if argument.is_write]
    if not changed:
        return fake

    def checked(*args):
        given = dict(zip(names, args, strict=True))
        tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        written = {n: tensors.pop(n) for n in changed if n in tensors}
        memory.apart(written, tensors, elementwise)
        return fake(*args)

    return checked


def no_gradient(name: str):
    """Return a `backward` that raises: the operator `name` has no second derivative.

    Without it, torch would silently treat the second derivative as zero.
    """

    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{name}: got a gradient of its gradient, which npu-ops does not have"
        )

    return backward


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Return whether a compiler or a torch.func transform is active: its tensors have no memory."""
    return torch.compiler.is_compiling() or is_transformed()


def is_plain(*tensors: torch.Tensor) -> bool:
    """Return whether tensors have memory with values, and no mode or autograd observes the call.

    False under a compiler, a dispatch mode or a transform, and if autograd records the call. Also
    False for a tensor subclass, a meta or batched tensor, a zero tensor without memory, and a
    negated view.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not _is_recorded(tensors) and all(map(_has_its_values, tensors))


def _has_its_values(x: torch.Tensor) -> bool:
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or x.is_neg():
        return False
    return not (x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x))


def readable(tensor: torch.Tensor) -> bool:
    """Return whether the values can be read without waiting for a device or breaking a trace."""
    return tensor.device.type == "cpu" and is_plain(tensor)


@functools.cache
def triton_why_not() -> str | None:
    """Return None, or why there are no Triton kernels. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (for Ascend: pip install triton-ascend)"
    return None


@functools.cache
def torch_npu_why_not(operator: str, *arguments: str) -> str | None:
    """Return None, or why the installed torch_npu lacks an operator or some of its arguments."""
    found = getattr(torch.ops.npu, operator, None)
    if found is None:
        return f"torch_npu has no {operator}"
    known = {argument.name for argument in found.default._schema.arguments}
    missing = [argument for argument in arguments if argument not in known]
    return f"torch_npu's {operator} has no {', '.join(missing)}" if missing else None


def call_torch_npu(operator: str, *args, **kwargs):
    """Call torch_npu's own operator, even if npu_ops.consistent replaced it at BackendSelect."""
    ours = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    with torch._C._ExcludeDispatchKeyGuard(ours):
        return getattr(torch.ops.npu, operator)(*args, **kwargs)


@functools.cache
def fla_npu_why_not(operator: str, *arguments: str) -> str | None:
    """Return None, or why the installed fla_npu lacks an operator or some of its arguments.

    Imports fla_npu, which needs CANN. It inspects the Python functions that fla_npu wraps, because
    they have signatures.
    """
    if importlib.util.find_spec("fla_npu") is None:
        return "fla_npu is not installed"
    try:
        found = importlib.import_module("fla_npu.ops.ascendc").ASCENDC_CTYPES_OPS.get(operator)
    except Exception as error:  # any error counts: no CANN, one of another version, ...
        return f"fla_npu does not work: {type(error).__name__}: {error}"
    if found is None:
        return f"fla_npu has no {operator}"
    missing = [name for name in arguments if name not in inspect.signature(found).parameters]
    return f"fla_npu's {operator} has no {', '.join(missing)}" if missing else None


def dtype_why_not(*args) -> str | None:
    """Return None, or which floating dtype of the arguments has no compiled kernel."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dtype not in KERNEL_DTYPES:
            if arg.is_floating_point():
                return f"it has no {str(arg.dtype).removeprefix('torch.')} kernel"
    return None


def native_why_not() -> str | None:
    """Return None, or why there are no native kernels."""
    return build_info()["why_not"]


@functools.cache
def build_info() -> dict:
    """Return how this installation was built.

    Returns:
        `native`: whether the CPU kernels are loaded; `why_not`: the reason if they are not;
        `broken`: whether they are installed but do not load here;
        `torch`, `compiler`: versions that they were built with (None without them);
        `cann`: folder of the CANN that AscendC kernels were built with (None without them).
    """
    info = {"native": False, "why_not": None, "broken": False}
    info |= dict.fromkeys(("torch", "compiler", "cann"))
    if _BUILD_INFO.exists():
        info |= json.loads(_BUILD_INFO.read_text())
    info["why_not"] = _load_native()
    info["native"] = info["why_not"] is None
    info["broken"] = not info["native"] and any(_BUILD_INFO.parent.glob("_native*.so"))
    return info


def say_what_is_broken() -> None:
    """Warn if native kernels are installed but do not load: PyTorch then computes instead."""
    if build_info()["broken"]:
        log.once(native_why_not())


@functools.cache
def _load_native() -> str | None:
    """Load the native library. Return None, or the reason why it is not available."""
    path = _BUILD_INFO.with_name(_NATIVE)
    if path.exists():
        try:
            torch.ops.load_library(path)
        except OSError as error:
            # some releases of torch hide the loader's error in the cause
            reason = error.__cause__ or error
            return f"the native library does not load: {reason}; {_REBUILD}"
        return None
    if any(path.parent.glob("_native*.so")):
        what = f"{_NATIVE}, the native library for torch {torch.__version__}"
        return f"{what}, is not installed; {_REBUILD}"
    return "installed without native kernels (NPU_OPS_SKIP_NATIVE=1 at install time)"
