"""Multiply by the sigmoid of a gate, in torch."""

from sgl_kernel_npu import absent as __getattr__  # noqa: F401


def fused_sigmoid_mul(x, gate):
    """Multiply by one gate per element."""
    return x * gate.sigmoid()


def fused_sigmoid_mul_broadcast(x, gate):
    """Multiply by one gate per row."""
    return x * gate.sigmoid()
