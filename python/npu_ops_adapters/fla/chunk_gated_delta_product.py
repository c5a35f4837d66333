"""Gated Delta Product: several steps of the gated delta rule per token.

Each step is passed to the rule as a token. Only a token's first step decays the state, and only the
output of its last step is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch, parameters


def patches() -> Iterable[Patch]:
    """Patch `chunk_gated_delta_product`, which also takes a cp_context from 0.6 on."""
    names = parameters(ours)
    yield functions.replaced(
        ("fla.ops.gated_delta_product.chunk",),
        "chunk_gated_delta_product",
        ours,
        names[:-1],
        names,
        op="chunk_gated_delta_rule",
    )


def ours(
    q, k, v, g, beta, num_householder, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of fla.

    q is [B, T, H, K], g is [B, T, H] or None; k, v and beta have T * num_householder in place of T.
    """
    check.floating("q", q)
    check.floating("k", k)
    check_device(q)
    steps = num_householder
    if not isinstance(steps, int) or steps < 1 or q.dim() != 4:
        raise ValueError(f"num_householder: got {steps!r}, needs 1 or more, and q [B, T, H, K]")
    if k.shape != (q.shape[0], q.shape[1] * steps, *q.shape[2:]):
        raise check.shape("k", k, f"q's {list(q.shape)} with {steps} steps for each token")
    if g is None:
        g = q.new_zeros(q.shape[:3], dtype=beta.dtype)
    shared = {"cu_seqlens": cu_seqlens}
    if cp_context is not None:
        shared = functions.shared(cp_context, q, initial_state, output_final_state)
    if shared["cu_seqlens"] is not None:
        shared["cu_seqlens"] = shared["cu_seqlens"] * steps
    call = functools.partial(
        npu_ops.chunk_gated_delta_rule, _at(q, steps, steps - 1), k, v, _at(g, steps, 0), beta,
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **shared,
    )  # fmt: skip
    return functools.partial(_read_last, call, steps)


def _at(x, steps: int, step: int):
    """Return x `[B, T, ...]` as `[B, T * steps, ...]`: at `step` of each token, zeros elsewhere."""
    nothing = torch.zeros_like(x)
    return torch.stack([x if i == step else nothing for i in range(steps)], 2).flatten(1, 2)


def _read_last(call: Callable, steps: int):
    o, state = call()
    return o.unflatten(1, (-1, steps))[:, :, -1].contiguous(), state
