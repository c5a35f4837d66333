"""By npu-ops: what its adapter computes where the kernel cannot."""

from npu_ops_adapters.sglang.split_gated_qkv import prefill as triton_split_qkv_rmsnorm_mrope

__all__ = ["triton_split_qkv_rmsnorm_mrope"]
