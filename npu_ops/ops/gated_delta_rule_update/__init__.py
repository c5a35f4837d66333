"""Gated Delta Net's decoding step in a server: from the convolution to o, in one launch."""

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
    """Decode, or verify drafted tokens: a few tokens of each sequence, its state in a pool.

    With `NPU_OPS_CONSISTENT=1` a token has the bits that training gives it (docs/invariance.md):
    gates are computed by PyTorch, as models do, and states are fp32 with values first.

    Does the split, l2norm of q and k (`x / sqrt(sum(x^2) + 1e-6)`), the gate
    `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigmoid(b)` and the gated delta rule (see
    `fused_recurrent_gated_delta_rule`), in fp32 whatever the pool's dtype. Each state is read once
    and written once; nothing waits for the device, so it can be captured in a graph.

    What is known of a sequence, and where its states go:

    - Decode: `state_indices` `[N]`. The state is read from its slot, and written there after the
      last token.
    - SGLang's verify: also `intermediate_states`, to which the state after each token goes, mostly
      with `disable_state_update`. With `num_accepted_tokens`, a sequence that has accepted m > 0
      tokens of the last step starts from the state that step kept after the m-th.
    - vLLM's verify: `state_indices` `[N, S]`, a slot for each token's state. The state is read from
      column `num_accepted_tokens - 1`, or 0 without it.

    Args:
        qkv: `[tokens, 2 H K + HV V]`, a token's q, k and v one after the other; or the three,
            `[tokens, H, K]`, `[tokens, H, K]` and `[tokens, HV, V]`. They may be strided by token.
        a, b: `[tokens, HV]`. A_log, dt_bias: `[HV]`; both None: the gates are ready, a is g and b
            is beta.
        state: the pool, fp32 or bf16, `[slots, HV, V, K]` or, with `state_v_first=False`,
            `[slots, HV, K, V]`. Slots may lie apart. Updated in place.
        state_indices: int32 or int64, a slot, or -1: the sequence is skipped and its outputs are 0
            (in `[N, S]`: where its state is read from; elsewhere that state goes nowhere).
        state_v_first: which of the two layouts the states have. It has no default, for nothing
            shows a mistake where K is V.
        cu_seqlens: int32 or int64 `[N + 1]`, where sequences begin and end; some may be empty, and
            their states stay. None: all have `tokens / N`. Outputs of tokens after the last
            sequence are 0.
        num_accepted_tokens: int32 or int64 `[N]`: 0 to T, or 1 to S with slots `[N, S]`.
        intermediate_states: in state's dtype, `[rows, T, HV, ...]`, for up to T tokens a sequence.
        intermediate_state_indices: int32 or int64 `[N]`, a row of it, or -1 to keep none; None: row
            n for sequence n.
        disable_state_update: the pool is left as it is.
        scale: of q; None: `K ** -0.5`.
        use_qk_l2norm_in_kernel: False where q and k are normalized already.
        softplus_beta, softplus_threshold: of the gate's softplus, as in `gdn_gate`.

    Returns:
        o `[tokens, HV, V]` in v's dtype. There is no gradient.

    Raises:
        TypeError: a dtype, also of the states, which are never converted. ValueError: a shape, a
        device, a required gradient, and on the CPU an index or a count outside its range, or two
        sequences that write to one place. On a device such a sequence is skipped and its outputs
        are NaN (in `[N, S]`, those of the tokens concerned), all of them where cu_seqlens is wrong,
        and who writes last to one place is not defined.

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
    """The operator's inputs, from the public function's arguments."""
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
    """What `NPU_OPS_CONSISTENT=1` makes of checked inputs: `l2norm` normalises q and k, and
    `gdn_gate` computes g and beta, as in a trainer."""
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
