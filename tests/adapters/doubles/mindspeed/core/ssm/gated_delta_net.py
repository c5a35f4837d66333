"""core_r0.16's own layer, which imports its operators by value; core_r0.18 has other names."""

from mindspeed import CALLS
from mindspeed.core.ssm.gdn_backend import chunk_gated_delta_rule, l2norm  # noqa: F401

_ms_chunk_gated_delta_rule, _ms_l2norm = chunk_gated_delta_rule, l2norm
causal_conv1d = None  # as without fla_npu


class GatedDeltaNet:
    def _apply_gated_norm(self, x, gate):
        CALLS.append("_apply_gated_norm")
        return x

    def _compute_g_and_beta(self, A_log_local_cp, dt_bias_local_cp, alpha, beta):
        CALLS.append("_compute_g_and_beta")
        return alpha, beta
