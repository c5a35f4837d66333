"""The torch library `npu_ops::` and the native kernels behind it.

Schemas are defined in Python, by each op's `op.py`, so an install without a compiler still has
every operator. The native library adds CPU kernels to them (`TORCH_LIBRARY_IMPL`, no schema).
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
# The C++ API of older releases is no stable ABI: a library for each, see setup.py.
_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
_NATIVE = "_native.abi3.so" if _TORCH >= (2, 10) else "_native_torch{}_{}.abi3.so".format(*_TORCH)
_REBUILD = (
    "`pip install --no-build-isolation --no-deps --force-reinstall --no-binary npu-ops npu-ops` "
    "builds it for this torch"
)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Tests set this to fill every output with NaN first, so that an element no kernel wrote shows.
poison_outputs = False


def dense_like(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """An uninitialised contiguous tensor with the shape of `x`; None for None."""
    if x is None:
        return None
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def poisoned(out: torch.Tensor) -> torch.Tensor:
    """Return the uninitialised `out`; filled with NaN if tests ask for it (`poison_outputs`)."""
    return out.fill_(float("nan")) if poison_outputs else out


def written(*tensors: torch.Tensor) -> None:
    """Tell autograd, and whoever goes by a tensor's version, that these were written in place."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def define(schema: str) -> str:
    """Define `npu_ops::<schema>` and return its name. torch refuses a name defined already."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return schema.partition("(")[0]


def operator(schema: str, run, fake, elementwise: bool = False) -> Callable:
    """Define `npu_ops::<schema>` with everything that torch wants of an operator.

    Not `torch.library.custom_op`: that costs four times as much a call.

    Args:
        run: computes it on any device.
        fake: makes outputs with the right shapes and dtypes, and computes nothing.
        elementwise: of an operator that writes to its arguments, see `memory.apart`.

    Returns:
        The function that calls it, see `caller`.
    """
    name = define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"npu_ops::{name}", _where_apart(name, fake, elementwise), lib=LIBRARY
    )
    return caller(name)


def caller(name: str) -> Callable:
    """A function that calls `npu_ops::<name>`, once, through torch's dispatcher.

    A call that autograd does not record skips the autograd kernel, which is Python and costs as
    much as the rest of the dispatcher.
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
    """Whether autograd, in any of its modes, may record a call with these inputs."""
    if is_transformed() or forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def differentiable(name: str, backward, save=None) -> None:
    """Give an operator its gradient.

    Args:
        name: of the operator.
        backward: from a context and the gradients of the outputs, those of the inputs.
        save: puts what backward needs into the context, from it, the inputs and the output.

    Not `torch.library.register_autograd`: `torch.func`'s transforms refuse what it registers.
    """
    kernel = _autograd_kernel(name, backward, save or (lambda ctx, inputs, output: None))
    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _autograd_kernel(name: str, backward, save) -> Callable:
    """The kernel for the dispatch key Autograd: it records the call, and lets the next compute."""
    overload = getattr(torch.ops.npu_ops, name).default

    def below_autograd(keys, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx, *given):
        *inputs, (keys, transformed) = given
        # torch turns gradients off in here, but those of outer transforms are taken below.
        with torch.enable_grad() if transformed else contextlib.nullcontext():
            output = below_autograd(keys, inputs)
        save(ctx, inputs, output)
        return output

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *grads: (*backward(ctx, *grads), None)),
    }
    function = type(name, (torch.autograd.Function,), members)
    # Not `function.apply`: it would handle torch.func's transforms, as the dispatcher did already.
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
    """Raise NotImplementedError for a tangent: no operator has a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tangent of forward-mode differentiation (jvp), needs reverse mode "
                "(vjp, grad, backward)"
            )


def _where_apart(name: str, fake, elementwise: bool):
    """`fake`, which for an operator that writes to arguments looks at their memory first.

    A compiler sees the arguments here alone, and turns what shares memory into what does not.
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
    """The `backward` of a backward that has none: it raises where torch would leave it out."""

    def backward(ctx, *grads):
        raise NotImplementedError(f"{name}: got a gradient of its gradient, which it does not have")

    return backward


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Whether tensors are a compiler's or a transform's, which have no memory."""
    return torch.compiler.is_compiling() or is_transformed()


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether tensors have memory with their values in it, and nobody else watches.

    False for a compiler, a dispatch mode, a transform and where autograd records; for a subclass, a
    meta or batched tensor, a zero tensor without memory and a negated view.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not _is_recorded(tensors) and all(map(_has_its_values, tensors))


def _has_its_values(x: torch.Tensor) -> bool:
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or x.is_neg():
        return False
    return not (x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x))


def readable(tensor: torch.Tensor) -> bool:
    """Whether reading values waits for no device and breaks no trace."""
    return tensor.device.type == "cpu" and is_plain(tensor)


@functools.cache
def triton_why_not() -> str | None:
    """None, or a sentence on why there are no Triton kernels. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (for Ascend: pip install triton-ascend)"
    return None


@functools.cache
def torch_npu_why_not(operator: str, *arguments: str) -> str | None:
    """None, or a sentence on why the torch_npu here has no such operator, or none that takes
    arguments of these names, which later versions of it do."""
    found = getattr(torch.ops.npu, operator, None)
    if found is None:
        return f"torch_npu has no {operator}"
    known = {argument.name for argument in found.default._schema.arguments}
    missing = [argument for argument in arguments if argument not in known]
    return f"torch_npu's {operator} has no {', '.join(missing)}" if missing else None


def call_torch_npu(operator: str, *args, **kwargs):
    """torch_npu's operator itself, also where npu_ops.consistent has put ours at BackendSelect."""
    ours = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    with torch._C._ExcludeDispatchKeyGuard(ours):
        return getattr(torch.ops.npu, operator)(*args, **kwargs)


@functools.cache
def fla_npu_why_not(operator: str, *arguments: str) -> str | None:
    """None, or a sentence on why fla_npu here has no such operator that takes these arguments.

    Imports fla_npu, which needs CANN. By the functions that it wraps, which have signatures.
    """
    if importlib.util.find_spec("fla_npu") is None:
        return "fla_npu is not installed"
    try:
        found = importlib.import_module("fla_npu.ops.ascendc").ASCENDC_CTYPES_OPS.get(operator)
    except Exception as error:  # no CANN, or one of another version: anything
        return f"fla_npu does not work: {type(error).__name__}: {error}"
    if found is None:
        return f"fla_npu has no {operator}"
    missing = [name for name in arguments if name not in inspect.signature(found).parameters]
    return f"fla_npu's {operator} has no {', '.join(missing)}" if missing else None


def dtype_why_not(*args) -> str | None:
    """None, or which floating dtype among the arguments the kernels are not compiled for."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dtype not in _KERNEL_DTYPES:
            if arg.is_floating_point():
                return f"it has no {str(arg.dtype).removeprefix('torch.')} kernel"
    return None


def native_why_not() -> str | None:
    """None, or a sentence on why there are no native kernels."""
    return build_info()["why_not"]


@functools.cache
def build_info() -> dict:
    """How this installation was built.

    Returns:
        `native`: whether the CPU kernels are loaded; `why_not`: a sentence if they are not;
        `broken`: whether they were installed and do not load here;
        `torch`, `compiler`: what they were built with (None without them);
        `cann`: the folder of the CANN that AscendC kernels were built with (None without them).
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
    """Warn of native kernels that were installed and do not load: PyTorch computes instead."""
    if build_info()["broken"]:
        log.once(native_why_not())


@functools.cache
def _load_native() -> str | None:
    """Load the native library; None, or the reason why there is none."""
    path = _BUILD_INFO.with_name(_NATIVE)
    if path.exists():
        try:
            torch.ops.load_library(path)
        except OSError as error:
            reason = error.__cause__ or error  # some releases of torch hide the loader's
            return f"the native library does not load: {reason}; {_REBUILD}"
        return None
    if any(path.parent.glob("_native*.so")):
        what = f"{_NATIVE}, the native library for torch {torch.__version__}"
        return f"{what}, is not installed; {_REBUILD}"
    return "installed without native kernels (NPU_OPS_SKIP_NATIVE=1 at install time)"
