"""Kimi Delta Attention (KDA), computed by chunks: training and prefill."""

from __future__ import annotations

import torch

from npu_ops.core import lengths
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_gated_delta_rule import conversion
from npu_ops.ops.chunk_kda import op
from npu_ops.ops.chunk_kda.arguments import check_call
from npu_ops.ops.chunk_kda.gate import log_decay
from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype

__all__ = ["chunk_kda"]


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute Kimi Delta Attention: a gated delta rule with a decay for each key channel.

    For every value head, with a state S of K keys by V values, token by token:
    `S = diag(exp(g)) S`, `S = S + k (beta (v - S^T k))^T`, `o = S^T (scale q)`. Matrix products
    compute a chunk of tokens at a time; the state is fp32. Only the inputs are saved for the
    backward, which recomputes the rest. With g <= 0 no exp overflows: all exponents are <= 0.

    Args:
        q, k: `[B, T, H, K]`, K up to 256. v: `[B, T, HV, V]`, V up to 256, in q's dtype. HV is a
            multiple of H: value head i uses key head `i // (HV // H)`.
        g: `[B, T, HV, K]`, the logarithm of the decay of each key channel, of any float dtype.
        beta: `[B, T, HV]`, of any float dtype. g and beta are converted to fp32 (fp64 if q is).
        scale: factor of q; None: `K ** -0.5`.
        initial_state: fp32 `[N, HV, K, V]` for N sequences; None is 0.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: first divide q and k by `sqrt(sum(x^2) + 1e-6)`, in fp32.
        use_gate_in_kernel: g holds raw gates and becomes `-exp(A_log) softplus(g + dt_bias)`, or
            with lower_bound `lower_bound sigmoid(exp(A_log) (g + dt_bias))`.
        use_beta_sigmoid_in_kernel: beta holds logits; its sigmoid is taken in fp32.
        allow_neg_eigval: double that sigmoid.
        safe_gate: fla's hint that gates are bounded. Kernels here need no bound.
        lower_bound: below 0, only for `use_gate_in_kernel`; None selects the softplus gate.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: int32 or int64 `[N + 1]`, with B = 1: the starts of N sequences, then the end of
            the last, as in `chunk_gated_delta_rule`.
        cu_seqlens_cpu: fla's launch argument; ignored.
        A_log: `[HV]`, only for `use_gate_in_kernel`; with lower_bound it may be None, which is 0.
        dt_bias: `[HV * K]`, only for `use_gate_in_kernel`; None is 0.
        chunk_size: 16, 32 or 64 tokens. With 1, and always with `NPU_OPS_CONSISTENT=1`, the forward
            runs token by token, with the kernel and the bits of `fused_recurrent_gated_delta_rule`
            with `gk`. `NPU_OPS_CONSISTENT` also rounds normalized q and k to their dtype.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final states in fp32, or None. Differentiable once
        in every floating argument.

    Raises:
        TypeError: a dtype is not supported; the state is never converted.
        ValueError: a shape or a device is invalid, flags exclude each other, or lengths are invalid
            (on the CPU; on a device, all outputs and gradients are NaN).

    Source: fla `chunk_kda`; Kimi Linear, arXiv:2510.26692.
    """
    inputs = _inputs(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        state_v_first, cu_seqlens, cu_seqlens_cpu, A_log, dt_bias, chunk_size,
    )  # fmt: skip
    o, final_state = op.forward(*inputs)
    return o, final_state if output_final_state else None


_Call = call_of(chunk_kda)


def _inputs(*args, **kwargs):
    """Check the public arguments; return the operator's inputs."""
    call = _Call(*args, **kwargs)
    check_call(call)
    return _converted(conversion.consistent(call))


def _converted(call):
    """Convert a checked call to the operator's inputs."""
    call = lengths.before_conversion(
        call, g=call.use_gate_in_kernel, beta=call.use_beta_sigmoid_in_kernel
    )
    g, wide = call.g, compute_dtype(call.q)
    if call.use_gate_in_kernel:
        g = log_decay(g, call.A_log, call.dt_bias, call.lower_bound)
    return op.forward.Inputs(
        q=call.q,
        k=call.k,
        v=call.v,
        g=g.to(wide),
        beta=conversion.beta(call, wide),
        initial_state=call.initial_state,
        cu_seqlens=call.cu_seqlens,
        scale=call.q.shape[3] ** -0.5 if call.scale is None else float(call.scale),
        chunk_size=int(call.chunk_size),
        state_v_first=bool(call.state_v_first),
        normalize=bool(call.use_qk_l2norm_in_kernel),
        output_final_state=bool(call.output_final_state),
    )


explains("chunk_kda", op.forward, _inputs)
