"""Functions with the kernels' signatures. They raise, because npu-ops must replace them."""

from sgl_kernel_npu import absent as __getattr__  # noqa: F401


def fused_gdn_gating_npu(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    raise NotImplementedError("npu-ops takes its place")


def fused_gdn_gating_kernel_without_sigmoid(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    raise NotImplementedError("npu-ops takes its place")
