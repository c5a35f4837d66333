"""rope as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.rope import reference

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_why_not(q, k, cos, sin) -> str | None:
    """What the compiled kernels have against these tensors; the same for rope and mrope."""
    if q.dtype not in KERNEL_DTYPES:
        return f"it has no {check.short(q.dtype)} kernel"
    if k.dtype != q.dtype:
        return f"q is {check.short(q.dtype)} and k is {check.short(k.dtype)}"
    if cos.dtype not in KERNEL_DTYPES or sin.dtype != cos.dtype:
        return f"cos is {check.short(cos.dtype)} and sin is {check.short(sin.dtype)}"
    if q.stride(-1) != 1 or k.stride(-1) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "the last dimension of q, k, cos or sin is not contiguous"
    return None


def triton_why_not(q, k, cos, sin, *rest) -> str | None:
    """`kernel_why_not`, and whether Triton is there."""
    return library.triton_why_not() or kernel_why_not(q, k, cos, sin)


def cpu_why_not(q, k, cos, sin, *rest) -> str | None:
    """`kernel_why_not`, and whether the native library is there."""
    return library.build_info()["why_not"] or kernel_why_not(q, k, cos, sin)


def _reference(q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out):
    rotated = reference.rope(q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim)
    q_out.copy_(rotated[0])
    k_out.copy_(rotated[1])


_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, str layout, str pair_layout, bool inverse, "
    "int rotary_dim"
)

table = Table(
    "rope",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.rope.triton_ascend:rope"),
            frozenset({"npu", "cuda"}),
            triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(
                f"rope_cpu(Tensor q, Tensor k, {_ARGUMENTS}, "
                "Tensor(a!) q_out, Tensor(b!) k_out) -> ()"
            ),
            frozenset({"cpu"}),
            cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)


def rows_of(x):
    """x with each head in one piece, as the kernels read it; a gradient often is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def run_table(table, q, k, *args):
    """The outputs of an op whose implementations write into copies of q and k."""
    q, k = rows_of(q), rows_of(k)
    q_out, k_out = library.new_output(q), library.new_output(k)
    if q.numel() or k.numel():
        table.run(q, k, *args, q_out, k_out)
    return q_out, k_out


def _rope(q, k, *args):
    return run_table(table, q, k, *args)


def _rope_in_place(q, k, *args):
    if q.numel() or k.numel():
        table.run(q, k, *args, q, k)
        library.written(q, k)


def fake(q, k, *args):
    """Outputs are like q and k."""
    return torch.empty_like(rows_of(q)), torch.empty_like(rows_of(k))


def save(ctx, inputs, output):
    """Keep the tables for backward; q and k are not needed."""
    _, _, cos, sin, positions, *ctx.settings = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx, grad_q, grad_k):
    layout, pair_layout, inverse, rotary_dim = ctx.settings
    grads = library.call(
        "rope", grad_q, grad_k, *ctx.saved_tensors, layout, pair_layout, not inverse, rotary_dim
    )
    return *grads, None, None, None, None, None, None, None


library.operator(
    f"rope(Tensor q, Tensor k, {_ARGUMENTS}) -> (Tensor, Tensor)", _rope, fake, _backward, save
)
library.operator(
    f"rope_(Tensor(a!) q, Tensor(b!) k, {_ARGUMENTS}) -> ()", _rope_in_place, lambda *args: None
)


def call(k, inplace: bool, *args):
    """Call the operator for a public function; `k` is the caller's, `args` the operator's."""
    return call_either(_rope, _rope_in_place, "rope", k, inplace, args)


def call_either(run, run_in_place, name: str, k, inplace: bool, args: tuple):
    """Run directly where nothing watches, else through torch; in place or not."""
    q, k_or_empty, *_ = args
    plain = library.is_plain(q, k_or_empty)
    if inplace:
        run_in_place(*args) if plain else library.call(f"{name}_", *args)
        return q, k
    q_out, k_out = run(*args) if plain else library.call(name, *args)
    return q_out, None if k is None else k_out
