"""mrope as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.mrope import reference
from npu_ops.ops.rope import op as rope

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, int[] mrope_section, str section_layout, "
    "str layout, str pair_layout, bool inverse, int rotary_dim"
)


def _reference(q, k, *args):
    *settings, q_out, k_out = args
    rotated = reference.mrope(q, k, *settings)
    q_out.copy_(rotated[0])
    k_out.copy_(rotated[1])


table = Table(
    "mrope",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.mrope.triton_ascend:mrope"),
            frozenset({"npu", "cuda"}),
            rope.triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(
                f"mrope_cpu(Tensor q, Tensor k, {_ARGUMENTS}, "
                "Tensor(a!) q_out, Tensor(b!) k_out) -> ()"
            ),
            frozenset({"cpu"}),
            rope.cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)


def _mrope(q, k, *args):
    return rope.run_table(table, q, k, *args)


def _mrope_in_place(q, k, *args):
    if q.numel() or k.numel():
        table.run(q, k, *args, q, k)
        library.written(q, k)


def _backward(ctx, grad_q, grad_k):
    *settings, inverse, rotary_dim = ctx.settings
    grads = library.call(
        "mrope", grad_q, grad_k, *ctx.saved_tensors, *settings, not inverse, rotary_dim
    )
    return *grads, *[None] * 9


library.operator(
    f"mrope(Tensor q, Tensor k, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _mrope,
    rope.fake,
    _backward,
    rope.save,
)
library.operator(
    f"mrope_(Tensor(a!) q, Tensor(b!) k, {_ARGUMENTS}) -> ()", _mrope_in_place, lambda *args: None
)


def call(k, inplace: bool, *args):
    """Call the operator for a public function; `k` is the caller's, `args` the operator's."""
    return rope.call_either(_mrope, _mrope_in_place, "mrope", k, inplace, args)
