"""The torch library `npu_ops::` and the native kernels behind it.

Schemas are defined in Python, by each op's `op.py`, so an install without a compiler still has
every operator. The native library adds CPU kernels to them (`TORCH_LIBRARY_IMPL`, no schema).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from npu_ops.core import memory

LIBRARY = torch.library.Library("npu_ops", "DEF")
_BUILD_INFO = pathlib.Path(__file__).parent.parent / "_build_info.json"
_NATIVE = "_native.abi3.so"
KNOWN = "npu_ops._known"
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Tests set this to fill every output with NaN first, so that an element no kernel wrote shows.
poison_outputs = False


def new_output(
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """An uninitialised tensor with the shape and stride order of `like`: the kernels' allocator."""
    return poisoned(torch.empty_like(like, dtype=dtype, memory_format=memory_format))


def dense_like(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """An uninitialised contiguous tensor with the shape of `x`; None for None."""
    if x is None:
        return None
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def poisoned(out: torch.Tensor) -> torch.Tensor:
    """`out`, which is uninitialised, as kernels get it."""
    return out.fill_(float("nan")) if poison_outputs else out


def written(*tensors: torch.Tensor) -> None:
    """Tell autograd, and whoever goes by a tensor's version, that these were written in place."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def define(schema: str) -> str:
    """Define `npu_ops::<schema>` and return its name. torch refuses a name defined already."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return schema.partition("(")[0]


def operator(schema: str, run, fake, backward=None, save=None, elementwise: bool = False) -> None:
    """Define `npu_ops::<schema>` with everything torch wants of an operator.

    run: computes it on any device. fake: the output's shape and dtype alone. backward, save: its
    gradient, as `torch.library.register_autograd` takes them. elementwise: of one that
    writes to its arguments, see `memory.apart`.

    Not `torch.library.custom_op`: that costs four times as much a call.
    """
    name = define(schema)
    _runs[name] = run
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"npu_ops::{name}", _where_apart(name, fake, elementwise), lib=LIBRARY
    )
    if backward:
        differentiable(name, backward, save)


def differentiable(name: str, backward, save=None, write=None) -> None:
    """Give an operator its gradient, as `torch.library.register_autograd` takes it.

    write: the same as a recipe, see `core/recipes.py`: from the recipe, the context and the
    gradients of outputs, which are its first values; what was saved follows. Returns the places of
    the gradients of inputs, or None where there are no plans yet, or none at all.
    """
    torch.library.register_autograd(f"npu_ops::{name}", backward, setup_context=save, lib=LIBRARY)
    _transformed[name] = _function(name, backward, save)
    _gradients[name] = backward, save or _save_nothing, write
    _recorded[name] = recorder(name, _runs[name])


# What an operator computes, by its name.
_runs: dict[str, Callable] = {}
# Operators with a gradient, as `torch.func`'s transforms take them: torch makes of what is
# registered a function that they refuse.
_transformed: dict[str, type[torch.autograd.Function]] = {}
# The same in eager mode, where torch's own way costs four times as much: what records a call.
_recorded: dict[str, Callable] = {}
# What each of these is made of: backward, save and write.
_gradients: dict[str, tuple[Callable, Callable, Callable | None]] = {}


def gradient_of(name: str) -> tuple[Callable, Callable, Callable | None]:
    """What `differentiable` was told of an operator: backward, save and write."""
    return _gradients[name]


def _function(name: str, backward, save) -> type[torch.autograd.Function]:
    def forward(*args):
        return getattr(torch.ops.npu_ops, name)(*args)

    members = {
        "generate_vmap_rule": True,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(save or _save_nothing),
        "backward": staticmethod(backward),
    }
    return type(name, (torch.autograd.Function,), members)


def recorder(name: str, run: Callable, plan=None) -> Callable | None:
    """A function that computes `npu_ops::<name>` by `run` and records it; None without a gradient.

    It is `torch.autograd.Function.apply` without the look for functorch's transforms, which
    `watched` has ruled out. That, and what else it does in Python, is a third of what it costs.

    plan: of the calls that it is for; the gradient finds it in `ctx.plan`.
    """
    if name not in _gradients:
        return None
    backward, save, _ = _gradients[name]

    def forward(ctx, *args):
        result = run(*args)
        ctx.plan = plan
        save(ctx, args, result)
        return result

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), members)
    return super(torch.autograd.Function, function).apply


def _save_nothing(ctx, inputs, output) -> None:
    pass


def run(name: str, inputs: tuple, tensors: int):
    """Compute `npu_ops::<name>` the shortest way; of `inputs`, the first so many are `tensors`.

    Where nothing but autograd watches, torch's dispatcher is left out: it costs 13 us, and 50 with
    a gradient.
    """
    by = watched(inputs[:tensors])
    return _runs[name](*inputs) if by is None else run_watched(name, inputs, by)


def run_watched(name: str, inputs: tuple, by: str):
    """The same where somebody watches, as `watched` says."""
    if by is BY_AUTOGRAD and name in _recorded:
        return _recorded[name](*inputs)
    return call(name, *inputs)


def call(name: str, *args):
    """Call `npu_ops::<name>` through torch: with autograd, a compiler, modes and transforms.

    Raises:
        NotImplementedError: an argument has a tangent, for there is no forward-mode derivative.
    """
    operator = getattr(torch.ops.npu_ops, name)
    if torch.compiler.is_compiling():
        return operator(*args)
    if forward_ad._current_level >= 0:
        _refuse_tangents(name, args)
    if name in _transformed and torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed[name].apply(*args)
    return operator(*args)


def _refuse_tangents(name: str, args: tuple) -> None:
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


def is_traced() -> bool:
    """Whether tensors are a compiler's or a functorch transform's, which have no memory."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether an operator on these may skip torch's dispatcher.

    True in eager mode on ordinary tensors: no gradient to record, nothing watching (a compiler,
    fake tensors, a dispatch mode, a transform, forward-mode differentiation), and memory to compute
    with (not meta).
    """
    return watched(tensors) is None


def readable(tensor: torch.Tensor) -> bool:
    """Whether reading values waits for no device and breaks no trace."""
    return tensor.device.type == "cpu" and is_plain(tensor)


BY_AUTOGRAD, BY_MORE = "by autograd", "by more"


def watched(tensors: Sequence[torch.Tensor | None]) -> str | None:
    """Who sees an operator on these besides its implementation."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return BY_MORE
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return BY_MORE
    grad, recorded = torch.is_grad_enabled(), None
    for t in tensors:  # a loop: `all` of a generator costs a microsecond more
        if t is None:
            continue
        if type(t) not in _PLAIN or t.is_meta or _is_batched(t):
            return BY_MORE
        if grad and t.requires_grad:
            recorded = BY_AUTOGRAD
    return recorded


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Of torch.autograd.grad(is_grads_batched=True), which has a vmap of its own.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


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
        `torch`, `torch_target`, `compiler`: what they were built with (None without them);
        `known_why_not`: None, or a sentence on why known calls go through Python.
    """
    info = {"native": False, "why_not": None, "torch": None, "torch_target": None, "compiler": None}
    if _BUILD_INFO.exists():
        info |= json.loads(_BUILD_INFO.read_text())
    info["why_not"] = _load_native()
    info["native"] = info["why_not"] is None
    info["known_why_not"] = info["why_not"] or _load_known(info["torch"])
    return info


@functools.cache
def _load_native() -> str | None:
    """Load the native library; None, or the reason why there is none."""
    path = _BUILD_INFO.with_name(_NATIVE)
    if not path.exists():
        return "installed without native kernels (NPU_OPS_SKIP_NATIVE=1 at install time)"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"the native library does not load: {error}"
    return None


def _load_known(built_with: str) -> str | None:
    """Load what makes known calls in C++; None, or the reason why it is not there."""
    if built_with != torch.__version__:
        return f"they are built for one torch: here {torch.__version__}, then {built_with}"
    try:
        importlib.import_module(KNOWN)
    except ImportError as error:
        return f"installed without (NPU_OPS_SKIP_KNOWN=1, or it did not compile): {error}"
    return None


@functools.cache
def known():
    """What makes known calls in C++ (`csrc/known`); None without, see `build_info`."""
    return None if build_info()["known_why_not"] else importlib.import_module(KNOWN)
