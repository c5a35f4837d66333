"""Shared by chunk_gated_delta_rule and chunk_kda: checks arguments, and defines chunk sizes.

`call` is a NamedTuple of a public function's arguments.
"""

from __future__ import annotations

from npu_ops.core import check, env, library, spans
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_common, check_like

CHUNK_SIZES = (16, 32, 64)
CHUNK = CHUNK_SIZES[-1]
# With one token per chunk, the forward runs token by token, as decoding does.
TOKEN = 1
_SIZES = (TOKEN, *CHUNK_SIZES)


def check_call(call) -> None:
    """Check the arguments of `chunk_gated_delta_rule`."""
    check.tensor("g", call.g)
    check.tensor("beta", call.beta)
    if call.carry_unfinished:
        _check_carried(call)
    check_common(call, unfinished_rows if call.carry_unfinished else None)
    check_like("g", call.g, call.v, call.v.shape[:3])
    check_like("beta", call.beta, call.v, call.v.shape[:3])
    for name in ("cu_seqlens_cpu", "chunk_indices"):
        if getattr(call, name) is not None and call.cu_seqlens is None:
            raise ValueError(f"{name}: got a value without cu_seqlens, needs both")
    spans.check(call.cp_group, call.cp_layout, call.initial_state, call.cu_seqlens)
    by_chunks = call.return_intermediate_states or call.cp_group is not None
    check.one_of("chunk_size", call.chunk_size, CHUNK_SIZES if by_chunks else _SIZES)
    if call.return_intermediate_states:
        check.alone("return_intermediate_states", cp_group=call.cp_group)
    # Gradients do not flow back from the states before chunks, or from carried states.
    for name in ("return_intermediate_states", "carry_unfinished"):
        if getattr(call, name):
            named = dict(zip(type(call)._fields, call, strict=True))
            check.no_gradient(named, f" with {name}")
    if call.carry_unfinished:
        _check_counts(call.initial_state, call.v.shape[3])


def _check_counts(carried, values: int) -> None:
    """Check the number of tokens in carried states, unless reading it would wait for a device."""
    if carried is None or not library.readable(carried):
        return
    wrong = [n for n in counts_of(carried, values).tolist() if n not in range(CHUNK + 1)]
    if wrong:
        raise ValueError(
            f"initial_state: got an unfinished chunk of {wrong[0]:g} tokens, needs 0 to {CHUNK}"
        )


def counts_of(carried, values: int):
    """Return the number of tokens in the unfinished chunk of each carried state, `[N]`.

    Every head stores the number after the chunk's values, g and beta; this reads head 0.
    """
    return carried[:, 0, values + CHUNK :].flatten(1)[:, CHUNK * (values + 2)]


def unfinished_rows(keys: int, values: int) -> int:
    """Return how many extra rows a carried state needs for the tokens of its unfinished chunk.

    A carried state is `[N, HV, V + unfinished_rows(K, V), K]`, see `carry_unfinished` of
    `chunk_gated_delta_rule`. Zeros are the state of a new sequence.

    Args:
        keys, values: K and V.

    Returns:
        64 rows for the keys of 64 tokens, plus the number of rows, of K elements each, that hold
        their values, g, beta and count.
    """
    return CHUNK + -(-(CHUNK * (values + 2) + 1) // keys)


def _check_carried(call) -> None:
    """Check the arguments that carry_unfinished excludes or requires."""
    before = call.return_intermediate_states or None
    check.alone("carry_unfinished", cp_group=call.cp_group, return_intermediate_states=before)
    if not call.state_v_first:
        raise ValueError("state_v_first: got False with carry_unfinished, needs True")
    if call.chunk_size != CHUNK:
        raise ValueError(f"chunk_size: got {call.chunk_size} with carry_unfinished, needs {CHUNK}")


def check_consistent(call) -> None:
    """Raise ValueError for arguments that the current mode of NPU_OPS_CONSISTENT excludes."""
    mode = f"with NPU_OPS_CONSISTENT={env.settings.consistent_as_set}"
    if getattr(call, "cp_group", None) is not None:
        raise ValueError(f"cp_group: got a group {mode}, needs None")
    if env.settings.consistent == "chunks":
        if call.chunk_size != CHUNK:
            raise ValueError(f"chunk_size: got {call.chunk_size} {mode}, needs {CHUNK}")
        return
    for name in ("return_intermediate_states", "carry_unfinished"):
        if getattr(call, name, False):
            raise ValueError(f"{name}: got True {mode}, needs False")
