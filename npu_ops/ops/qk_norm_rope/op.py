"""Declaration of qk_norm_rope: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core import check
from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import in_one_piece
from npu_ops.ops.qk_norm_rope import reference
from npu_ops.ops.rms_norm_gated.reference import compute_dtype
from npu_ops.ops.rope.rotation import check_positions, why_not_wide

# qkv: [B, S, W] or [T, W]. cos, sin: [A, Bc, rows, W]. positions: [A, Bp, S]. The number of axes A
# is 3 with an mrope_section, else 1.
_INPUTS = (
    "Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor? positions, "
    "int num_heads, int num_kv_heads, float eps, bool zero_centered, bool gated, "
    "int[] mrope_section, str section_layout, str pair_layout, int rotary_dim"
)
# Largest head dimension: in the backward kernels a tile must hold a whole head.
WIDEST = 512


def _outputs(inputs):
    """Allocate q `[..., N, D]` and k `[..., KV, D]`; v and the gate only if they are copied."""
    dim = inputs.q_weight.shape[0]

    def heads(number, wanted=True):
        shape = (*inputs.qkv.shape[:-1], number, dim)
        return inputs.qkv.new_empty(shape) if wanted else None

    queries, keys = inputs.num_heads, inputs.num_kv_heads
    v = heads(keys, inputs.copy_rest)
    return heads(queries), heads(keys), v, heads(queries, inputs.copy_rest and inputs.gated)


def _gradients(inputs):
    """Allocate the gradients. Those of the weights are sums over tokens, so in fp32 or fp64."""
    wide = compute_dtype(inputs.qkv, inputs.q_weight, inputs.k_weight)
    weights = (dense_like(weight, wide) for weight in (inputs.q_weight, inputs.k_weight))
    return dense_like(inputs.qkv), *weights


def _lay_out(arguments):
    """View packed tokens as a batch of one, and make last dimensions contiguous."""
    packed = arguments.qkv.dim() == 2
    results = ("q", "k", "v", "gate")
    batched = ("qkv", "grad_qkv", *results, *(f"grad_{name}" for name in results))
    laid = {}
    for name, x in zip(arguments._fields, arguments, strict=True):
        if name in batched and x is not None:
            laid[name] = in_one_piece(x.unsqueeze(0) if packed else x)
        elif name in ("cos", "sin"):
            laid[name] = in_one_piece(x)
        elif name in ("q_weight", "k_weight"):
            laid[name] = x.contiguous()
    return arguments._replace(**laid)


def _why_not(arguments) -> str | None:
    cos, sin = check.short(arguments.cos.dtype), check.short(arguments.sin.dtype)
    return None if cos == sin else f"cos is {cos} and sin is {sin}"


def _why_not_triton(arguments) -> str | None:
    dim = arguments.q_weight.shape[0]
    if dim > WIDEST:
        return f"heads of {dim} elements are longer than {WIDEST}"
    return _why_not(arguments)


def _why_not_ascendc(arguments) -> str | None:
    return why_not_wide(arguments) or _why_not_triton(arguments)


def _no_tokens(arguments) -> bool:
    return not arguments.qkv.numel()


forward = Operator(
    "qk_norm_rope",
    f"{_INPUTS} -> q, k, v?, gate?",
    shapes="bool copy_rest",
    new=_outputs,
    reference=reference.qk_norm_rope,
    lay_out=_lay_out,
    why_not={"cpu": _why_not, "triton_ascend": _why_not_triton, "ascendc": _why_not_ascendc},
    ascendc=True,
    is_empty=_no_tokens,
    check_indices=check_positions,
)
backward = Backward(
    forward,
    f"Tensor grad_q, Tensor grad_k, Tensor? grad_v, Tensor? grad_gate, {_INPUTS} "
    "-> grad_qkv, grad_q_weight, grad_k_weight",
    new=_gradients,
    reference=reference.qk_norm_rope_backward,
)
