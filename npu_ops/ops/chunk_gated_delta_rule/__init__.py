"""The gated delta rule of Gated Delta Net, computed by chunks: training and prefill."""

from __future__ import annotations

import torch

from npu_ops.core import lengths, library, log
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_gated_delta_rule import context_parallel, conversion, op, unfinished
from npu_ops.ops.chunk_gated_delta_rule.arguments import check_call, unfinished_rows
from npu_ops.ops.chunk_gated_delta_rule.reference import compute_dtype
from npu_ops.ops.gdn_gate import gdn_gate

__all__ = ["chunk_gated_delta_rule", "unfinished_rows"]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    cp_group: torch.distributed.ProcessGroup | None = None,
    cp_layout: str = "contiguous",
    return_intermediate_states: bool = False,
    carry_unfinished: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Compute the gated delta rule: each token decays, updates and reads a state.

    For every value head, with a state S of K keys by V values, token by token: `S = exp(g) S`, `S =
    S + k (beta (v - S^T k))^T`, `o = S^T (scale q)`. Matrix products compute a chunk of tokens at a
    time; the state stays in fp32. This function accepts calls written for fla's
    `chunk_gated_delta_rule`. Only the inputs are saved for the backward, which recomputes the rest.

    Args:
        q, k: `[B, T, H, K]`, K up to 256. v: `[B, T, HV, V]`, V up to 256, in q's dtype. HV is a
            multiple of H: value head i uses key head `i // (HV // H)`.
        g: `[B, T, HV]`, the logarithm of the decay, of any float dtype. A g above 0 lets the state
            grow; on the CPU this logs a warning once.
        beta: `[B, T, HV]`, of any float dtype. g and beta are converted to fp32 (fp64 if q is).
        scale: factor of q; None: `K ** -0.5`.
        initial_state: fp32 `[N, HV, K, V]` for N sequences; None is 0.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: first divide q and k by `sqrt(sum(x^2) + 1e-6)`, in fp32. As in
            decoding, the quotients are not rounded to q's dtype, except by the vendor's operators
            and with NPU_OPS_CONSISTENT.
        use_beta_sigmoid_in_kernel: beta holds logits; its sigmoid is taken in fp32.
        allow_neg_eigval: double that sigmoid.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: int32 or int64 `[N + 1]`, with B = 1: the starts of N sequences, then the end of
            the last. The first is 0, the last at most T. The final state of an empty sequence is
            its initial state. Tokens after the last sequence get 0, in o and in gradients.
        cu_seqlens_cpu, chunk_indices: fla's launch arguments; ignored, as chunks are located on the
            device.
        use_gate_in_kernel: g holds raw gates and becomes `-exp(A_log) softplus(g + dt_bias)`
            (`gdn_gate`).
        A_log, dt_bias: `[HV]`, only for `use_gate_in_kernel`; dt_bias may be None.
        chunk_size: 16, 32 or 64 tokens. With 1, and always with `NPU_OPS_CONSISTENT=1`, the forward
            runs token by token with the kernel of `gated_delta_rule_update`. With the same g and
            beta, both functions return the same bits.
        cp_group: process group whose ranks share the tokens. Every rank must call this function and
            run the backward. cu_seqlens then describes the whole sequences, the same on every rank.
            Excludes initial_state. Final states are those after this rank's part.
        cp_layout: "contiguous": each rank has one contiguous part of all tokens, of any length, in
            the order of ranks. "zigzag" (Megatron's, needs cu_seqlens): for n ranks each sequence
            is cut into 2 n equal chunks; rank r has chunks r and 2 n - 1 - r of each, in order.
            Zigzag sends a state and a K by K matrix for each sequence; contiguous sends them for
            one sequence.
        return_intermediate_states: also return the state before each chunk, which a server caches
            for prompts with a common prefix. Excludes gradients and cp_group.
        carry_unfinished: initial and final states are carried states, `[N, HV, V +
            unfinished_rows(K, V), K]` with state_v_first=True and chunks of 64. They hold the state
            before the unfinished chunk, and that chunk's tokens. With NPU_OPS_CONSISTENT=chunks,
            a sequence may be cut after any token and continued: its results keep the same bits.
            Zeros are the state of a new sequence. Excludes gradients.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final states in fp32, or None. Differentiable once
        in every floating argument.

        With return_intermediate_states also the states before chunks: fp32 `[chunks, HV, K, V]`, or
        `[chunks, HV, V, K]` with state_v_first, ordered by sequence, ceil(length / chunk_size) of
        each. A packed call returns T // chunk_size + N rows, because it does not wait for the
        lengths; rows after the last chunk are 0.

    Raises:
        TypeError: a dtype is not supported (the state is never converted), or an argument was
            removed from fla.
        ValueError: a shape or a device is invalid, flags exclude each other, or lengths are invalid
            (on the CPU; on a device, all outputs and gradients are NaN). Also: a gradient is
            required with return_intermediate_states or carry_unfinished. Also: a carried state does
            not have 0 to 64 tokens (on a device, the results of its sequence are NaN).

    Source: fla `chunk_gated_delta_rule`; Gated Delta Networks, arXiv:2412.06464.
    """
    inputs = _inputs(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu,
        chunk_indices, use_gate_in_kernel, A_log, dt_bias, chunk_size, cp_group, cp_layout,
        return_intermediate_states, carry_unfinished,
    )  # fmt: skip
    if carry_unfinished:
        o, final_state = unfinished.forward(inputs)
        return o, final_state if output_final_state else None
    if return_intermediate_states:
        o, final_state, before = op.prefill(*tuple(inputs)[:-1])
        return o, final_state if output_final_state else None, before
    if cp_group is not None:
        inputs = context_parallel.continued(inputs, cp_group, cp_layout)
    o, final_state = op.forward(*inputs)
    if cp_layout == "zigzag" and output_final_state:
        final_state = final_state[1::2]  # states after the later chunk of each sequence
    return o, final_state if output_final_state else None


_Call = call_of(chunk_gated_delta_rule)


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
        g = gdn_gate(g, call.A_log, call.dt_bias)
    else:
        _warn_of_growth(g)
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


def _warn_of_growth(g) -> None:
    """Warn once if a g is above 0; do not check if reading g would wait for a device."""
    if library.readable(g.detach()) and (g > 0).any():
        log.once("chunk_gated_delta_rule: g has values above 0, which make the state grow")


explains("chunk_gated_delta_rule", op.forward, _inputs)
