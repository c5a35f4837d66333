"""Computes the gates of Gated Delta Net: the decay of the state and the size of its update."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_ops.core import check, env
from npu_ops.core.registry import explains
from npu_ops.ops.gdn_gate import op
from npu_ops.ops.gdn_gate.softplus import check_softplus

__all__ = ["gdn_gate"]


def gdn_gate(
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the log decay `g = -exp(A_log) * softplus(a + dt_bias)`, and `beta = sigmoid(b)`.

    It computes in fp32 (float64: in float64) in one pass. No intermediate result overflows if the
    final one does not. The gradients of A_log and dt_bias are summed over all tokens in fp32, in a
    fixed order. With `NPU_OPS_CONSISTENT` (1 or chunks) PyTorch computes the gates, as in models
    (docs/invariance.md).

    Args:
        a: `[..., HV]`, float32, bfloat16, float16 or float64; a slice of a projection is read
            without a copy.
        A_log: `[HV]`, the logarithm of the decay rate of each value head.
        dt_bias: `[HV]` or None.
        b: a's shape, or None. All dtypes may differ.
        allow_neg_eigval: beta is `2 * sigmoid(b)`, so that the state's transition may have a
            negative eigenvalue.
        softplus_beta, softplus_threshold: softplus is `log(1 + exp(beta x)) / beta`, or x if `beta
            x` exceeds the threshold. The defaults are torch's, which models use.

    Returns:
        g, `[..., HV]` in float32 (float64 if a, A_log or dt_bias is), never positive. With b also
        beta, in b's dtype. Both are contiguous. Differentiable once in a, A_log, dt_bias, b.

    Raises:
        TypeError: an argument is not a tensor or not of a floating dtype.
        ValueError: a shape or a device is invalid, `allow_neg_eigval` without b, softplus_beta <=
            0, or softplus_threshold < 0.
        NotImplementedError: the backward itself is differentiated.

    Source: transformers `modeling_qwen3_next.py`; flash-linear-attention
    `fla/ops/gated_delta_rule/gate.py`; Yang et al., "Gated Delta Networks", 2024.
    """
    args = _prepare(
        a, A_log, dt_bias, b, allow_neg_eigval=allow_neg_eigval, softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
    )  # fmt: skip
    g, beta = of_models(*args) if env.settings.consistent else op.forward(*args)
    return g if b is None else (g, beta)


def of_models(a, A_log, dt_bias, b, beta_scale, softplus_beta, softplus_threshold):
    """Compute g and beta with the PyTorch operators of transformers and Megatron, in their order.

    The results have the same bits as in a trainer that does not call npu-ops for its gates.
    """
    raw = a.float() if dt_bias is None else a.float() + dt_bias
    g = -A_log.float().exp() * F.softplus(raw, softplus_beta, softplus_threshold)
    if b is None:
        return g, None
    return g, b.sigmoid() if beta_scale == 1 else beta_scale * b.sigmoid()


def _prepare(
    a, A_log, dt_bias=None, b=None, *, allow_neg_eigval=False, softplus_beta=1.0,
    softplus_threshold=20.0,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    check.floating("a", a)
    if a.dim() == 0:
        raise check.shape("a", a, "at least one dimension")
    _check_head("A_log", A_log, a)
    if dt_bias is not None:
        _check_head("dt_bias", dt_bias, a)
    if b is not None:
        check.floating("b", b)
        if b.shape != a.shape:
            raise check.shape("b", b, f"a's shape {list(a.shape)}")
        check.same_device("b", b, "a", a)
    elif allow_neg_eigval:
        raise ValueError(f"allow_neg_eigval: got {allow_neg_eigval!r}, needs b")
    softplus = check_softplus(softplus_beta, softplus_threshold)
    return a, A_log, dt_bias, b, 2.0 if allow_neg_eigval else 1.0, *softplus


def _check_head(name, value, a):
    """Check a parameter with one number per head."""
    check.floating(name, value)
    if value.shape != a.shape[-1:]:
        raise check.shape(name, value, f"[{a.shape[-1]}], one number for each head of a")
    check.same_device(name, value, "a", a)


explains("gdn_gate", op.forward, _prepare)
