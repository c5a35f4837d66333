"""Replaces the delta rule of prefill in SGLang 0.5.9; `gated_delta_net.py` in later versions."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops.core import make
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions, gated_delta_net

_HEAD, _TAIL = ("q", "k", "v", "g", "beta", "scale", "initial_state"), ("cu_seqlens", "head_first")


def patches() -> Iterable[Patch]:
    """Patch `chunk_gated_delta_rule` in the module of SGLang's backend."""
    if not functions.since("0.5.10"):
        yield functions.replaced(
            f"{functions.gated_delta_net()}:chunk_gated_delta_rule",
            "chunk_gated_delta_rule",
            ours,
            "on NPUs it is sgl-kernel-npu's function, which takes only K = V = 128",
            (*_HEAD, "initial_state_indices", *_TAIL, "use_qk_l2norm_in_kernel"),
            (*_HEAD, "output_final_state", *_TAIL, "use_qk_l2norm_in_kernel"),
        )


def ours(
    q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None,
    head_first=False, use_qk_l2norm_in_kernel=False, output_final_state=True,
):  # fmt: skip
    """Return o, the final states, and the states between chunks.

    With initial_state_indices, initial_state is a pool: the final states are written to it, and
    None is returned for them.
    """
    functions.check_device(q)
    functions.refuse(scale=scale, head_first=head_first)
    if not use_qk_l2norm_in_kernel or initial_state is None or cu_seqlens is None:
        raise ValueError("got other arguments than SGLang's backend passes")
    pooled = initial_state_indices is not None
    slots = initial_state_indices if pooled else make.counted(len(initial_state), device=q.device)
    v_first = gated_delta_net.state_v_first()
    o, after, between = gated_delta_net.prefill(
        v_first, q, k, v, g, beta, initial_state, slots, cu_seqlens
    )
    if not pooled:
        return o, after, between
    functions.write_slots(initial_state, slots, after)
    return o, None, between
