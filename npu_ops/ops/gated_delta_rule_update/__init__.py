"""Runs Gated Delta Net's decoding step in a server: all after the convolution, in one launch."""

from __future__ import annotations

import torch

from npu_ops.core import check, env
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.gated_delta_rule_update import op
from npu_ops.ops.gated_delta_rule_update.arguments import (
    check_consistent,
    check_inputs,
    pool_of,
    split,
)
from npu_ops.ops.gdn_gate import gdn_gate
from npu_ops.ops.gdn_gate.softplus import check_softplus
from npu_ops.ops.l2norm import l2norm

__all__ = ["gated_delta_rule_update"]


def gated_delta_rule_update(
    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """Decode, or verify draft tokens: a few tokens per sequence, with states in a pool.

    Splits qkv, applies l2norm to q and k (`x / sqrt(sum(x^2) + 1e-6)`), computes the gates `g =
    -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, and applies the gated delta rule
    (see `fused_recurrent_gated_delta_rule`). It computes in fp32, whatever the pool's dtype. Each
    state is read once and written once. A call never waits for the device, so it can be captured in
    a graph.

    With `NPU_OPS_CONSISTENT=1` a token gets the same bits as in training (docs/invariance.md):
    PyTorch computes the gates, as in models, and states must be fp32 with state_v_first.

    Where states are read from and written to:

    - Decode: `state_indices` `[N]`. A state is read from its slot, and written there after the last
      token.
    - SGLang's verify: the state after each token is also written to `intermediate_states`, usually
      with `disable_state_update`. With `num_accepted_tokens`, a sequence that accepted m > 0 tokens
      of the last step starts from the stored state after the m-th.
    - vLLM's verify: `state_indices` `[N, S]`, a slot for the state after each token. The first
      state is read from column `num_accepted_tokens - 1`, or column 0 without it.

    Args:
        qkv: `[tokens, 2 H K + HV V]`, each token's q, k and v one after the other; or a tuple of
            `[tokens, H, K]`, `[tokens, H, K]` and `[tokens, HV, V]`. Tokens may be strided.
        a, b: `[tokens, HV]`. A_log, dt_bias: `[HV]`. If both are None, the gates are ready: a is g
            and b is beta.
        state: the pool, fp32 or bf16, `[slots, HV, V, K]` or, with `state_v_first=False`, `[slots,
            HV, K, V]`. Slots may be strided. Updated in place.
        state_indices: int32 or int64 slots. -1 skips the sequence, and its outputs are 0. In `[N,
            S]` this holds for the column that the state is read from; a -1 in another column means
            that this state is not stored.
        state_v_first: layout of the states. It has no default, because a mistake would go unnoticed
            if K equals V.
        cu_seqlens: int32 or int64 `[N + 1]`: the starts of sequences, then the end of the last.
            Sequences may be empty; their states stay unchanged. None: each sequence has `tokens /
            N` tokens. Outputs of tokens after the last sequence are 0.
        num_accepted_tokens: int32 or int64 `[N]`, tokens of the last step that were accepted: 0 to
            T, or 1 to S with slots `[N, S]`.
        intermediate_states: in state's dtype, `[rows, T, HV, ...]`, for up to T tokens per
            sequence.
        intermediate_state_indices: int32 or int64 `[N]`, the row of intermediate_states for each
            sequence, or -1 to store nothing; None: row n for sequence n.
        disable_state_update: leave the pool unchanged.
        scale: factor of q; None: `K ** -0.5`.
        use_qk_l2norm_in_kernel: False if q and k are already normalized.
        softplus_beta, softplus_threshold: of the gate's softplus, as in `gdn_gate`.

    Returns:
        o `[tokens, HV, V]` in v's dtype. There is no gradient.

    Raises:
        TypeError: a dtype is not supported; states are never converted.
        ValueError: a shape or a device is invalid, or a gradient is required. On the CPU also: an
            index or a count is outside its range, or two sequences write to one place. On a device
            such a sequence is skipped and its outputs are NaN. With slots `[N, S]`, an invalid slot
            for the state after a token makes only that token's output NaN. Invalid cu_seqlens do
            this to all sequences. If two sequences write to one place on a device, it is undefined
            which sequence's state remains.

    Source: SGLang `fused_sigmoid_gating_delta_rule_update` and vLLM
    `fused_recurrent_gated_delta_rule`.
    """
    inputs = _inputs(
        qkv, a, b, A_log, dt_bias, state, state_indices, state_v_first, cu_seqlens,
        num_accepted_tokens, intermediate_states, intermediate_state_indices, disable_state_update,
        scale, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold,
    )  # fmt: skip
    return op.forward(*(_consistent(inputs) if env.settings.consistent else inputs))


_Call = call_of(gated_delta_rule_update)


def _inputs(*args, **kwargs):
    """Check the public arguments; return the operator's inputs."""
    call = _Call(*args, **kwargs)
    pool = pool_of(call.state, call.state_v_first)
    q, k, v = split(call.qkv, pool)
    check.scale("scale", call.scale)
    beta, threshold = check_softplus(call.softplus_beta, call.softplus_threshold)
    inputs = op.forward.Inputs(
        q=q,
        k=k,
        v=v,
        a=call.a,
        b=call.b,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
        state=call.state,
        state_indices=call.state_indices,
        cu_seqlens=call.cu_seqlens,
        num_accepted_tokens=call.num_accepted_tokens,
        intermediate_states=call.intermediate_states,
        intermediate_state_indices=call.intermediate_state_indices,
        scale=pool.keys**-0.5 if call.scale is None else float(call.scale),
        normalize=bool(call.use_qk_l2norm_in_kernel),
        state_v_first=bool(call.state_v_first),
        update=not call.disable_state_update,
        softplus_beta=beta,
        softplus_threshold=threshold,
    )
    check_inputs(inputs)
    return inputs


def _consistent(inputs):
    """Compute the norm and the gates as training does, for `NPU_OPS_CONSISTENT=1`.

    `l2norm` normalizes q and k, and `gdn_gate` computes g and beta, as in a trainer.
    """
    check_consistent(inputs, env.settings.consistent)
    if inputs.normalize:
        inputs = inputs._replace(q=l2norm(inputs.q), k=l2norm(inputs.k), normalize=False)
    if inputs.A_log is None:
        return inputs
    g, beta = gdn_gate(
        inputs.a, inputs.A_log, inputs.dt_bias, inputs.b, softplus_beta=inputs.softplus_beta,
        softplus_threshold=inputs.softplus_threshold,
    )  # fmt: skip
    return inputs._replace(a=g, b=beta, A_log=None, dt_bias=None)


explains("gated_delta_rule_update", op.forward, _inputs)
