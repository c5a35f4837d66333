"""Shared by chunk_gated_delta_rule and chunk_kda: converts a checked call for the operator."""

from __future__ import annotations

from npu_ops.core import env, lengths
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN, check_consistent
from npu_ops.ops.l2norm import l2norm


def consistent(call):
    """Apply NPU_OPS_CONSISTENT to a checked call.

    `l2norm` normalises q and k before the operator runs. In mode "tokens" the rule then runs token
    by token.
    """
    if not env.settings.consistent:
        return call
    check_consistent(call)
    if call.use_qk_l2norm_in_kernel:
        call = lengths.before_conversion(call, q=True, k=True)
        call = call._replace(q=l2norm(call.q), k=l2norm(call.k), use_qk_l2norm_in_kernel=False)
    return call._replace(chunk_size=TOKEN) if env.settings.consistent == "tokens" else call


def beta(call, wide):
    """Return beta in the dtype `wide`; apply the sigmoid and double it if the call asks for it."""
    given = call.beta.to(wide)
    if call.use_beta_sigmoid_in_kernel:
        given = given.sigmoid() * (2 if call.allow_neg_eigval else 1)
    return given
