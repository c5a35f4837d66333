"""The gated delta rule of Gated Delta Net, by chunks: training and prefill."""

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
    """What each token reads from a state that decays, and that moves towards (k, v) by beta.

    For every value head, with a state S of K keys by V values, token by token:
    `S = exp(g) S`, `S = S + k (beta (v - S^T k))^T`, `o = S^T (scale q)`. Computed a chunk of
    tokens at a time, by matrix products; the state is fp32 all the way. Takes fla's call as it is.
    The backward keeps the inputs alone and computes the rest again.

    Args:
        q, k: `[B, T, H, K]`, K up to 256. v: `[B, T, HV, V]`, V up to 256, in q's dtype. HV is a
            multiple of H: value head i reads with head `i // (HV // H)`.
        g: `[B, T, HV]`, the logarithm of the decay, of any float dtype. One above 0 lets the state
            grow; a warning says so once, on the CPU.
        beta: `[B, T, HV]`, of any float dtype. g and beta are computed with in fp32.
        scale: of q; None: `K ** -0.5`.
        initial_state: fp32 `[N, HV, K, V]` for N sequences; None is 0.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: q and k are divided by `sqrt(sum(x^2) + 1e-6)` first, in fp32: not
            rounded to their dtype between, so that a prompt leaves the state that decoding would.
        use_beta_sigmoid_in_kernel: beta is raw and becomes its sigmoid, in fp32.
        allow_neg_eigval: that sigmoid is doubled.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: int32 or int64 `[N + 1]`, with B = 1: the starts of N sequences and their end,
            0 first, T or less last. A sequence may be empty; its state passes through. Tokens
            behind the last one get 0, in o and in gradients.
        cu_seqlens_cpu, chunk_indices: fla's, for its launches. Not needed and not read: where the
            chunks are is found on the device.
        use_gate_in_kernel: g is raw and becomes `-exp(A_log) softplus(g + dt_bias)` (`gdn_gate`).
        A_log, dt_bias: `[HV]`, for `use_gate_in_kernel` alone; dt_bias may be None.
        chunk_size: 16, 32 or 64 tokens. 1, as always with `NPU_OPS_CONSISTENT=1`: the forward goes
            token by token with the kernel of `gated_delta_rule_update`, and has its bits.
        cp_group: the tokens are a part of those that the ranks of this group have together; all
            call this and go backward together. cu_seqlens is that of the whole sequences, the same
            on every rank. Without initial_state. Final states are those after this rank's part.
        cp_layout: "contiguous": a rank has one span of all tokens, of any length, in the order of
            ranks. "zigzag", Megatron's, with cu_seqlens: each sequence is 2 n equal chunks for n
            ranks; rank r has chunks r and 2 n - 1 - r of each, one behind the other. That sends a
            state and a K by K matrix of each sequence; a span sends those of one.
        return_intermediate_states: also return the state before each chunk, which a server keeps
            for prompts that begin alike. Without a gradient, and without cp_group.
        carry_unfinished: initial and final states are carried states,
            `[N, HV, V + unfinished_rows(K, V), K]` with state_v_first=True and chunks of 64: the
            state before the unfinished chunk, and that chunk's tokens. A sequence that goes on
            behind any token has the bits it has uncut, with NPU_OPS_CONSISTENT=chunks. Zeros are
            the state of a new sequence. Without a gradient.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final states in fp32, or None. Differentiable, once,
        in every floating argument. With return_intermediate_states also the states before chunks,
        fp32 `[chunks, HV, K, V]`, or values first as the state is, sequence by sequence, each
        ceil(length / chunk_size) of them; a packed call has T // chunk_size + N rows, for nobody
        waits for the lengths, of which those behind the last chunk are 0.

    Raises:
        TypeError: a dtype, also of the state, which is never converted; an argument that fla took
        once. ValueError: a shape, a device, flags that do not go together, wrong lengths (on the
        CPU; on a device o, states, and gradients of both are NaN), a required gradient with
        return_intermediate_states or carry_unfinished, a carried state that has not from 0 to 64
        tokens (on a device its sequence is NaN).

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
        final_state = final_state[1::2]  # behind the later chunk of each sequence
    return o, final_state if output_final_state else None


_Call = call_of(chunk_gated_delta_rule)


def _inputs(*args, **kwargs):
    """The operator's inputs, from the public function's arguments."""
    call = _Call(*args, **kwargs)
    check_call(call)
    return _converted(conversion.consistent(call))


def _converted(call):
    """A call that was checked, as the operator takes it."""
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
    """Only where looking at g waits for no device."""
    if library.readable(g.detach()) and (g > 0).any():
        log.once("chunk_gated_delta_rule: a g is above 0, which lets the state grow")


explains("chunk_gated_delta_rule", op.forward, _inputs)
