"""The gated delta rule of Gated Delta Net, token by token: short sequences and decoding."""

from __future__ import annotations

import torch

from npu_ops.core import lengths
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.fused_recurrent_gated_delta_rule import op
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_call
from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype
from npu_ops.ops.gdn_gate import gdn_gate
from npu_ops.ops.l2norm import l2norm

__all__ = ["fused_recurrent_gated_delta_rule"]


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule: each token decays, updates and reads a state.

    For every value head, with a state S of K keys by V values, token by token: `S = exp(g) S`, `S =
    S + k (beta (v - S^T k))^T`, `o = S^T (scale q)`. The state stays in fp32. This function accepts
    calls written for fla's `fused_recurrent_gated_delta_rule`. Unlike fla's, it has a gradient.

    Args:
        q, k: `[B, T, H, K]`, K up to 256. v: `[B, T, HV, V]`, V up to 256, in q's dtype. HV is a
            multiple of H: value head i uses key head `i // (HV // H)`.
        g, gk, gv: logarithms of the decay, of any float dtype: `[B, T, HV]` for the whole state,
            `[B, T, HV, K]` per key, `[B, T, HV, V]` per value. None: no such decay.
        beta: `[B, T, HV]`, or `[B, T, HV, V]` per value; None is 1.
        scale: factor of q; None: `K ** -0.5`.
        initial_state: fp32 `[N, HV, K, V]` for N sequences; None is 0.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: first divide q and k by `sqrt(sum(x^2) + 1e-6)`, in fp32.
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens: as in `chunk_gated_delta_rule`.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final states in fp32, or None. Differentiable once
        in every floating argument.

    Raises:
        TypeError: a dtype is not supported; the state is never converted.
        ValueError: a shape or a device is invalid, flags exclude each other, or lengths are invalid
            (on the CPU; on a device, all outputs and gradients are NaN).

    Source: fla `fused_recurrent_gated_delta_rule`; Gated Delta Networks, arXiv:2412.06464.
    """
    inputs = _inputs(
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens,
    )  # fmt: skip
    o, final_state = op.forward(*inputs)
    return o, final_state if output_final_state else None


_Call = call_of(fused_recurrent_gated_delta_rule)


def _inputs(*args, **kwargs):
    """Check the public arguments; return the operator's inputs."""
    call = _Call(*args, **kwargs)
    check_call(call)
    return _converted(call)


def _converted(call):
    """Convert a checked call to the operator's inputs: apply norm, gate and sigmoid if set."""
    call = lengths.before_conversion(
        call, q=call.use_qk_l2norm_in_kernel, k=call.use_qk_l2norm_in_kernel,
        g=call.use_gate_in_kernel, beta=call.use_beta_sigmoid_in_kernel,
    )  # fmt: skip
    q, k, g, beta, wide = call.q, call.k, call.g, call.beta, compute_dtype(call.q)
    if call.use_qk_l2norm_in_kernel:
        q, k = (l2norm(x, output_dtype=wide) for x in (q, k))
    if call.use_gate_in_kernel:
        g = gdn_gate(g, call.A_log, call.dt_bias)
    if call.use_beta_sigmoid_in_kernel:
        beta = beta.to(wide).sigmoid() * (2 if call.allow_neg_eigval else 1)
    if beta is None:
        beta = torch.ones_like(call.v[..., :1])
    return op.forward.Inputs(
        q=q,
        k=k,
        v=call.v,
        g=g,
        gk=call.gk,
        gv=call.gv,
        beta=beta if beta.dim() == 4 else beta[..., None],
        initial_state=call.initial_state,
        cu_seqlens=call.cu_seqlens,
        scale=q.shape[3] ** -0.5 if call.scale is None else float(call.scale),
        state_v_first=bool(call.state_v_first),
        output_final_state=bool(call.output_final_state),
    )


explains("fused_recurrent_gated_delta_rule", op.forward, _inputs)
