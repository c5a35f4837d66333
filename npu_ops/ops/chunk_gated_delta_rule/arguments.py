"""The checks of calls of chunk_gated_delta_rule. A call has its arguments by name."""

from __future__ import annotations

from npu_ops.core import check, spans
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_common, check_like

CHUNK_SIZES = (16, 32, 64)
# A chunk of one token: the forward goes token by token, as decoding does.
TOKEN = 1
_SIZES = (TOKEN, *CHUNK_SIZES)


def check_call(call) -> None:
    """Check a call of `chunk_gated_delta_rule`."""
    check.tensor("g", call.g)
    check.tensor("beta", call.beta)
    check_common(call)
    check_like("g", call.g, call.v, call.v.shape[:3])
    check_like("beta", call.beta, call.v, call.v.shape[:3])
    for name in ("cu_seqlens_cpu", "chunk_indices"):
        if getattr(call, name) is not None and call.cu_seqlens is None:
            raise ValueError(f"{name}: got one without cu_seqlens, needs both")
    spans.check(call.cp_group, call.cp_layout, call.initial_state, call.cu_seqlens)
    by_chunks = call.return_intermediate_states or call.cp_group is not None
    check.one_of("chunk_size", call.chunk_size, CHUNK_SIZES if by_chunks else _SIZES)
    if call.return_intermediate_states:
        check.alone("return_intermediate_states", cp_group=call.cp_group)
        # States between chunks are no outputs that gradients come back from.
        check.no_gradient(call._asdict(), " with return_intermediate_states")


def check_consistent(call) -> None:
    """Refuse what only chunks can do, for the mode `consistent`."""
    if call.return_intermediate_states:
        raise ValueError(
            "return_intermediate_states: got True with NPU_OPS_CONSISTENT=1, needs False"
        )
    if call.cp_group is not None:
        raise ValueError("cp_group: got a group with NPU_OPS_CONSISTENT=1, needs None")
