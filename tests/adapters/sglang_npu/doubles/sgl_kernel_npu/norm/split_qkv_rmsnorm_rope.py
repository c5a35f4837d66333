"""The kernels' stand-ins: npu-ops' functions for calls that the kernels cannot run."""

from npu_ops_adapters.sglang.split_gated_qkv import step as split_qkvgate_gemma_rmsnorm_rope
from npu_ops_adapters.sglang.split_qkv_rmsnorm_rope import compute as split_qkv_rmsnorm_rope

__all__ = ["split_qkv_rmsnorm_rope", "split_qkvgate_gemma_rmsnorm_rope"]
