"""The layer's module: imports kernels by value, has the rule in PyTorch and no convolution."""

from mindspeed import CALLS
from mindspeed.core.ssm.gdn_backend import chunk_gated_delta_rule, l2norm  # noqa: F401

causal_conv1d = None


def torch_chunk_gated_delta_rule(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=True, cu_seqlens=None,
):  # fmt: skip
    CALLS.append("torch_chunk_gated_delta_rule")
    return value, None


class GatedDeltaNet:
    def __init__(self, config=None):
        if config is not None:
            rules = {"triton": config.use_triton_gdn, "ascend": config.use_ascend_gdn}
            self.rule = next((rule for rule, chosen in rules.items() if chosen), "torch")

    def _apply_gated_norm(self, x, gate):
        CALLS.append("_apply_gated_norm")
        return x

    def _compute_g_and_beta(self, A_log_local_cp, dt_bias_local_cp, alpha, beta):
        CALLS.append("_compute_g_and_beta")
        return alpha, beta
