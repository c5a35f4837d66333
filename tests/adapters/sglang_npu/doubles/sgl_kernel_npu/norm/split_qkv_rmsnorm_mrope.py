"""The kernel's stand-in: npu-ops' function for calls that the kernel cannot run."""

from npu_ops_adapters.sglang.split_gated_qkv import prefill as triton_split_qkv_rmsnorm_mrope

__all__ = ["triton_split_qkv_rmsnorm_mrope"]
