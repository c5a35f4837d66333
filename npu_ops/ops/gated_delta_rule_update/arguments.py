"""Splits qkv into views, and checks all arguments of gated_delta_rule_update."""

from __future__ import annotations

from typing import NamedTuple

import torch

from npu_ops.core import check, indices, library, make
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import MAX_DIM


class Pool(NamedTuple):
    """Head counts and sizes, taken from the shape of the states."""

    value_heads: int
    keys: int
    values: int


def pool_of(state, v_first) -> Pool:
    """Check a pool of states, and return its sizes."""
    check.tensor("state", state)
    layout = "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]"
    if state.dim() != 4 or not all(0 < n <= MAX_DIM for n in state.shape[2:]) or not state.shape[1]:
        raise check.shape("state", state, f"{layout}, K and V up to {MAX_DIM}")
    _check_memory("state", state, 1)
    heads, *matrix = state.shape[1:]
    return Pool(heads, *(matrix[::-1] if v_first else matrix))


def split(qkv, pool: Pool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k `[tokens, H, K]` and v `[tokens, HV, V]` as views. qkv: one tensor, or three."""
    heads, keys, values = pool
    if not isinstance(qkv, torch.Tensor):
        if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
            raise TypeError(f"qkv: got {type(qkv).__name__}, needs a tensor, or q, k and v")
        _check_heads(*qkv, pool)
        return tuple(qkv)
    check.floating("qkv", qkv)
    width = heads * values
    needs = f"[tokens, 2 * H * {keys} + {width}], H a divisor of {heads}"
    if qkv.dim() != 2:
        raise check.shape("qkv", qkv, needs)
    both = qkv.shape[1] - width  # q and k
    key_heads = both // (2 * keys)  # Dynamo does not support divmod of sizes
    if key_heads < 1 or both % (2 * keys) or heads % key_heads:
        raise check.shape("qkv", qkv, needs)
    q, k, v = qkv.split((key_heads * keys, key_heads * keys, width), 1)
    q, k = (x.view(x.shape[0], key_heads, keys) for x in (q, k))
    return q, k, v.view(v.shape[0], heads, values)


def _check_heads(q, k, v, pool: Pool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.floating(name, x)
        check.same_dtype(name, x, "q", q)
    heads, keys, values = pool
    if q.dim() != 3 or q.shape[2] != keys or not q.shape[1] or heads % q.shape[1]:
        raise check.shape("q", q, f"[tokens, H, {keys}], H a divisor of {heads}")
    _check_shape("k", k, q.shape)
    _check_shape("v", v, (q.shape[0], heads, values))


def check_inputs(inputs) -> None:
    """Check the operator's inputs. `pool_of` and `split` must run first."""
    _check_shapes(inputs)
    _check_kept(inputs)
    named = zip(type(inputs)._fields, inputs, strict=True)
    tensors = {("qkv" if name == "q" else name): x for name, x in named if _is_tensor(x)}
    for name, x in tensors.items():
        check.same_device(name, x, "qkv", inputs.q)
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, needs torch.no_grad()"
            )
    written = {name: tensors.pop(name, None) for name in ("state", "intermediate_states")}
    check.writable(written, tensors)
    host = inputs.state_indices.device.type == "cpu"
    if host and library.is_plain(
        inputs.state_indices, inputs.cu_seqlens, inputs.num_accepted_tokens,
        inputs.intermediate_state_indices,
    ):  # fmt: skip
        check_values(inputs)


def check_consistent(inputs, mode: str) -> None:
    """Raise ValueError or TypeError for inputs that NPU_OPS_CONSISTENT excludes.

    mode: "tokens" or "chunks".
    """
    if mode == "chunks":
        raise ValueError(
            "state: got a state without its unfinished chunk with NPU_OPS_CONSISTENT=chunks, needs "
            "a call of chunk_gated_delta_rule with carry_unfinished=True, which also decodes"
        )
    if not inputs.state_v_first:
        raise ValueError("state_v_first: got False with NPU_OPS_CONSISTENT=1, needs True")
    if inputs.state.dtype == torch.bfloat16:
        raise TypeError("state: got bfloat16 with NPU_OPS_CONSISTENT=1, needs float32")


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def _check_shapes(inputs) -> None:
    tokens, heads = inputs.v.shape[:2]
    for name in ("a", "b"):
        check.floating(name, getattr(inputs, name))
        _check_shape(name, getattr(inputs, name), (tokens, heads))
    ready = inputs.A_log is inputs.dt_bias is None
    for name in () if ready else ("A_log", "dt_bias"):
        check.floating(name, getattr(inputs, name))
        _check_shape(name, getattr(inputs, name), (heads,))
    _check_state_dtype("state", inputs.state, inputs.v)
    slots = inputs.state_indices
    check.indices("state_indices", slots)
    if slots.dim() not in (1, 2) or 0 in slots.shape[1:]:
        raise check.shape("state_indices", slots, "[N] or [N, S]")
    count = slots.shape[0]
    if tokens and (not count or (inputs.cu_seqlens is None and tokens % count)):
        raise ValueError(
            f"state_indices: got {count} sequences, needs a divisor of {tokens} tokens"
        )
    for name, length in (
        ("cu_seqlens", count + 1),
        ("num_accepted_tokens", count),
        ("intermediate_state_indices", count),
    ):
        x = getattr(inputs, name)
        if x is not None:
            check.indices(name, x)
            _check_shape(name, x, (length,))


def _check_shape(name, x, needs) -> None:
    if tuple(x.shape) != tuple(needs):
        raise check.shape(name, x, str(list(needs)))


def _check_state_dtype(name, x, v) -> None:
    wide = v.dtype == torch.float64
    allowed = (torch.float64,) if wide else (torch.float32, torch.bfloat16)
    check.dtype(name, x, *allowed)


def _check_memory(name, x, leading: int) -> None:
    """Check that each state is contiguous and that states do not overlap.

    leading: number of dimensions that index the states.
    """
    size = x[(0,) * leading].numel() if x.numel() else 0
    if not size:
        return
    slots = zip(x.shape[:leading], x.stride()[:leading], strict=True)
    apart = all(n == 1 or stride >= size for n, stride in slots)
    if not x[(0,) * leading].is_contiguous() or not apart:
        raise ValueError(
            f"{name}: got strides {list(x.stride())}, needs contiguous states that do not overlap"
        )


def _check_kept(inputs) -> None:
    """Check the intermediate states, and the arguments that need them."""
    kept, state, slots = inputs.intermediate_states, inputs.state, inputs.state_indices
    rows, accepted = inputs.intermediate_state_indices, inputs.num_accepted_tokens
    if kept is None:
        for name, x in (
            ("intermediate_state_indices", rows),
            ("num_accepted_tokens", accepted if slots.dim() == 1 else None),
        ):
            if x is not None:
                raise ValueError(f"{name}: got a tensor, needs intermediate_states")
        return
    check.tensor("intermediate_states", kept)
    if slots.dim() == 2:
        raise ValueError("intermediate_states: got a tensor, needs None with state_indices [N, S]")
    check.same_dtype("intermediate_states", kept, "state", state)
    if kept.dim() != 5 or kept.shape[2:] != state.shape[1:] or not kept.shape[1]:
        raise check.shape("intermediate_states", kept, f"[rows, T, *{list(state.shape[1:])}]")
    if rows is None and kept.shape[0] < slots.shape[0]:
        needs = f"at least {slots.shape[0]} rows, one per sequence"
        raise check.shape("intermediate_states", kept, needs)
    _check_memory("intermediate_states", kept, 2)


def check_values(inputs) -> None:
    """Check indices and counts in host memory.

    The operator also calls this function, because a compiled call skips the argument checks.
    """
    slots, kept = inputs.state_indices, inputs.intermediate_states
    rows, accepted = inputs.intermediate_state_indices, inputs.num_accepted_tokens
    per_token = slots.dim() == 2
    lengths = _lengths(inputs.v.shape[0], slots.shape[0], inputs.cu_seqlens)
    # A sequence whose first slot is -1 is skipped: its other indices may be anything.
    used = _first_slots(slots, accepted) != -1
    slots, lengths = slots[used], lengths[used]
    rows, accepted = (None if x is None else x[used] for x in (rows, accepted))
    longest = int(lengths.max()) if len(lengths) else 0
    _check_range("state_indices", slots, -1, inputs.state.shape[0] - 1)
    if per_token or kept is not None:
        name, x = ("state_indices", slots) if per_token else ("intermediate_states", kept)
        steps = x.shape[1]
        if longest > steps:
            raise ValueError(f"{name}: got room for {steps} tokens, needs {longest}")
        if accepted is not None:
            _check_range("num_accepted_tokens", accepted, int(per_token), steps)
    if rows is not None:
        _check_range("intermediate_state_indices", rows, -1, kept.shape[0] - 1)
        if accepted is not None and bool(((rows < 0) & (accepted > 0)).any()):
            raise ValueError("intermediate_state_indices: got -1, needs a row for accepted tokens")
        _check_once("intermediate_state_indices", rows)
    if inputs.update:
        _check_once("state_indices", slots)


def _first_slots(slots, accepted):
    """Return the slot that each sequence starts from; clamps invalid counts of accepted tokens."""
    if slots.dim() == 1 or not slots.shape[0]:
        return slots.view(slots.shape[0], -1)[:, 0] if slots.numel() else slots.flatten()
    column = torch.zeros_like(slots[:, 0])
    if accepted is not None:
        column = accepted.clamp(1, slots.shape[1]) - 1
    return slots.gather(1, column.long()[:, None])[:, 0]


def _lengths(tokens: int, sequences: int, cu_seqlens):
    """Return the number of tokens of each sequence."""
    if cu_seqlens is None:
        return make.indices([tokens // max(1, sequences)] * sequences)
    indices.check_starts("cu_seqlens", cu_seqlens, tokens)
    return cu_seqlens.diff()


def _check_range(name, x, low, high) -> None:
    if x.numel() and not (low <= int(x.min()) and int(x.max()) <= high):
        raise ValueError(f"{name}: got {x.tolist()}, needs {low} to {high}")


def _check_once(name, places) -> None:
    """Check that no two sequences use the same slot or row; -1 stands for none."""
    seen = set()
    for row in places.tolist():
        own = {place for place in (row if isinstance(row, list) else [row]) if place >= 0}
        if own & seen:
            raise ValueError(f"{name}: got {(own & seen).pop()} twice, needs each at most once")
        seen |= own
