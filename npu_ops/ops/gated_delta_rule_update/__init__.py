"""Gated Delta Net's decoding step in a server: from the convolution to o, in one launch."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import explains
from npu_ops.ops.fused_recurrent_gated_delta_rule import MAX_DIM
from npu_ops.ops.gated_delta_rule_update import op

__all__ = ["gated_delta_rule_update"]


def gated_delta_rule_update(
    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
) -> torch.Tensor:
    """Decode, or verify drafted tokens: a few tokens of each sequence, its state in a pool.

    Does the split, l2norm of q and k (`x / sqrt(sum(x^2) + 1e-6)`), the gate
    `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigmoid(b)` and the gated delta rule (see
    `fused_recurrent_gated_delta_rule`), in fp32 whatever the pool's dtype. Each state is read once
    and written once; nothing waits for the device, so it can be captured in a graph.

    What is known of a sequence, and where its states go:

    - Decode: `state_indices` `[N]`. The state is read from its slot, and written there after the
      last token.
    - SGLang's verify: also `intermediate_states`, to which the state after each token goes, mostly
      with `disable_state_update`. With `num_accepted_tokens`, a sequence that has accepted m > 0
      tokens of the last step starts from the state that step kept after the m-th.
    - vLLM's verify: `state_indices` `[N, S]`, a slot for each token's state. The state is read from
      column `num_accepted_tokens - 1`, or 0 without it.

    Args:
        qkv: `[tokens, 2 H K + HV V]`, a token's q, k and v one after the other; or the three,
            `[tokens, H, K]`, `[tokens, H, K]` and `[tokens, HV, V]`. They may be strided by token.
        a, b: `[tokens, HV]`. A_log, dt_bias: `[HV]`.
        state: the pool, fp32 or bf16, `[slots, HV, V, K]` or, with `state_v_first=False`,
            `[slots, HV, K, V]`. Slots may lie apart. Updated in place.
        state_indices: int32 or int64, a slot, or -1: the sequence is skipped and its outputs are 0
            (in `[N, S]`: where its state is read from; elsewhere that state goes nowhere).
        state_v_first: which of the two layouts the states have. It has no default, for nothing
            shows a mistake where K is V.
        cu_seqlens: int32 or int64 `[N + 1]`, where sequences begin and end; some may be empty, and
            their states stay. None: all have `tokens / N`. Outputs of tokens after the last
            sequence are 0.
        num_accepted_tokens: int32 or int64 `[N]`: 0 to T, or 1 to S with slots `[N, S]`.
        intermediate_states: in state's dtype, `[rows, T, HV, ...]`, for up to T tokens a sequence.
        intermediate_state_indices: int32 or int64 `[N]`, a row of it, or -1 to keep none; None: row
            n for sequence n.
        disable_state_update: the pool is left as it is.
        scale: of q; None: `K ** -0.5`.
        use_qk_l2norm_in_kernel: False where q and k are normalized already.

    Returns:
        o `[tokens, HV, V]` in v's dtype. There is no gradient.

    Raises:
        TypeError: a dtype, also of the states, which are never converted. ValueError: a shape, a
        device, a required gradient, and on the CPU an index or a count outside its range, or two
        sequences that write to one place. On a device such a sequence is skipped and its outputs
        are NaN (in `[N, S]`, those of the tokens concerned), and who writes last to one place, a
        slot or a token of two sequences, is not defined.

    Source: SGLang `fused_sigmoid_gating_delta_rule_update` and vLLM
    `fused_recurrent_gated_delta_rule`.
    """
    args = _prepare(
        qkv, a, b, A_log, dt_bias, state, state_indices, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, num_accepted_tokens=num_accepted_tokens,
        intermediate_states=intermediate_states,
        intermediate_state_indices=intermediate_state_indices,
        disable_state_update=disable_state_update, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return op.call(*args)


def _prepare(
    qkv, a, b, A_log, dt_bias, state, state_indices, *, state_v_first, cu_seqlens=None,
    num_accepted_tokens=None, intermediate_states=None, intermediate_state_indices=None,
    disable_state_update=False, scale=None, use_qk_l2norm_in_kernel=True,
):  # fmt: skip
    """Check the public arguments; return them as the operator takes them."""
    value_heads, keys, values = _check_pool(state, state_v_first)
    q, k, v = _split(qkv, value_heads, keys, values)
    tokens = v.shape[0]
    for name, x, shape in (
        ("a", a, (tokens, value_heads)),
        ("b", b, (tokens, value_heads)),
        ("A_log", A_log, (value_heads,)),
        ("dt_bias", dt_bias, (value_heads,)),
    ):
        check.floating(name, x)
        _check_shape(name, x, shape)
    _check_state_dtype("state", state, v)
    check.indices("state_indices", state_indices)
    if state_indices.dim() not in (1, 2) or 0 in state_indices.shape[1:]:
        raise check.shape("state_indices", state_indices, "[N] or [N, S]")
    count = state_indices.shape[0]
    if tokens and (not count or (cu_seqlens is None and tokens % count)):
        raise ValueError(
            f"state_indices: got {count} sequences, needs a divisor of {tokens} tokens"
        )
    for name, x, length in (
        ("cu_seqlens", cu_seqlens, count + 1),
        ("num_accepted_tokens", num_accepted_tokens, count),
        ("intermediate_state_indices", intermediate_state_indices, count),
    ):
        if x is not None:
            check.indices(name, x)
            _check_shape(name, x, (length,))
    _check_kept(
        intermediate_states, intermediate_state_indices, num_accepted_tokens, state, state_indices
    )
    tensors = {
        "qkv": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
        "state": state, "state_indices": state_indices, "cu_seqlens": cu_seqlens,
        "num_accepted_tokens": num_accepted_tokens, "intermediate_states": intermediate_states,
        "intermediate_state_indices": intermediate_state_indices,
    }  # fmt: skip
    for name, x in tensors.items():
        if x is not None:
            check.same_device(name, x, "qkv", q)
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(f"{name}: got one that requires a gradient, needs torch.no_grad()")
    written = {name: tensors[name] for name in ("state", "intermediate_states")}
    check.writable(written, {name: x for name, x in tensors.items() if name not in written})
    lengths = state_indices, cu_seqlens, num_accepted_tokens
    kept = intermediate_states, intermediate_state_indices
    if state_indices.device.type == "cpu" and library.is_plain(
        *lengths, intermediate_state_indices
    ):
        _check_values(tokens, state.shape[0], *lengths, *kept, not disable_state_update)
    scale = keys**-0.5 if scale is None else float(scale)
    settings = scale, bool(use_qk_l2norm_in_kernel), bool(state_v_first), not disable_state_update
    return *tensors.values(), *settings


def _check_pool(state, v_first) -> tuple[int, int, int]:
    """Value heads, keys and values of a pool of states."""
    check.tensor("state", state)
    layout = "[slots, HV, V, K]" if v_first else "[slots, HV, K, V]"
    if state.dim() != 4 or not all(0 < n <= MAX_DIM for n in state.shape[2:]) or not state.shape[1]:
        raise check.shape("state", state, f"{layout}, K and V up to {MAX_DIM}")
    _check_memory("state", state, 1)
    heads, *matrix = state.shape[1:]
    return heads, *(matrix[::-1] if v_first else matrix)


def _check_memory(name, x, leading: int) -> None:
    """Check that states are contiguous, apart from their first `leading` dimensions, and apart."""
    size = x[(0,) * leading].numel() if x.numel() else 0
    if not size:
        return
    strides = x.stride()[:leading]
    apart = all(n == 1 or stride >= size for n, stride in zip(x.shape, strides, strict=False))
    if not x[(0,) * leading].is_contiguous() or not apart:
        raise ValueError(f"{name}: got strides {list(x.stride())}, needs contiguous states apart")


def _check_state_dtype(name, x, v) -> None:
    wide = v.dtype == torch.float64
    allowed = (torch.float64,) if wide else (torch.float32, torch.bfloat16)
    check.dtype(name, x, *allowed)


def _split(qkv, value_heads, keys, values):
    """q, k and v as views, packed or not."""
    if not isinstance(qkv, torch.Tensor):
        if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
            raise TypeError(f"qkv: got {type(qkv).__name__}, needs a tensor, or q, k and v")
        return _check_heads(*qkv, value_heads, keys, values)
    check.floating("qkv", qkv)
    width = value_heads * values
    heads, rest = divmod(qkv.shape[-1] - width, 2 * keys) if qkv.dim() == 2 else (0, 0)
    if heads < 1 or rest or value_heads % heads:
        needs = f"[tokens, 2 * H * {keys} + {width}], H a divisor of {value_heads}"
        raise check.shape("qkv", qkv, needs)
    q, k, v = qkv.split((heads * keys, heads * keys, width), 1)
    return *(x.unflatten(1, (heads, keys)) for x in (q, k)), v.unflatten(1, (value_heads, values))


def _check_heads(q, k, v, value_heads, keys, values):
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.floating(name, x)
        check.same_dtype(name, x, "q", q)
    if q.dim() != 3 or q.shape[2] != keys or not q.shape[1] or value_heads % q.shape[1]:
        raise check.shape("q", q, f"[tokens, H, {keys}], H a divisor of {value_heads}")
    _check_shape("k", k, q.shape)
    _check_shape("v", v, (q.shape[0], value_heads, values))
    return q, k, v


def _check_shape(name, x, needs) -> None:
    if tuple(x.shape) != tuple(needs):
        raise check.shape(name, x, str(list(needs)))


def _check_kept(kept, rows, accepted, state, state_indices) -> None:
    """Check the intermediate states, and that what goes with them does."""
    if kept is None:
        for name, x in (
            ("intermediate_state_indices", rows),
            ("num_accepted_tokens", accepted if state_indices.dim() == 1 else None),
        ):
            if x is not None:
                raise ValueError(f"{name}: got a tensor, needs intermediate_states")
        return
    check.tensor("intermediate_states", kept)
    if state_indices.dim() == 2:
        raise ValueError("intermediate_states: got a tensor, needs None with state_indices [N, S]")
    check.same_dtype("intermediate_states", kept, "state", state)
    if kept.dim() != 5 or kept.shape[2:] != state.shape[1:] or not kept.shape[1]:
        raise check.shape("intermediate_states", kept, f"[rows, T, *{list(state.shape[1:])}]")
    if rows is None and kept.shape[0] < state_indices.shape[0]:
        needs = f"at least {state_indices.shape[0]} rows, one a sequence"
        raise check.shape("intermediate_states", kept, needs)
    _check_memory("intermediate_states", kept, 2)


def _check_values(tokens, slots, state_indices, cu_seqlens, accepted, kept, rows, update) -> None:
    """Check indices and counts, which are on the host."""
    count = state_indices.shape[0]
    lengths = [tokens // max(1, count)] * count
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last > tokens or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens: got {cu_seqlens.tolist()}, needs 0 first, then starts that do not "
                f"decrease, up to {tokens}"
            )
    _check_range("state_indices", state_indices, -1, slots - 1)
    per_token = state_indices.dim() == 2
    if kept is not None or per_token:
        name, steps = (
            ("state_indices", state_indices.shape[1])
            if per_token
            else ("intermediate_states", kept.shape[1])
        )
        if max(lengths, default=0) > steps:
            raise ValueError(f"{name}: got room for {steps} tokens, needs {max(lengths)}")
        if accepted is not None:
            _check_range("num_accepted_tokens", accepted, int(per_token), steps)
    if rows is not None:
        _check_range("intermediate_state_indices", rows, -1, kept.shape[0] - 1)
        if accepted is not None and bool(((rows < 0) & (accepted > 0)).any()):
            raise ValueError("intermediate_state_indices: got -1, needs a row for accepted tokens")
        _check_once("intermediate_state_indices", rows[state_indices >= 0])
    if update:
        _check_once("state_indices", state_indices)


def _check_range(name, x, low, high) -> None:
    if x.numel() and not (low <= int(x.min()) and int(x.max()) <= high):
        raise ValueError(f"{name}: got {x.tolist()}, needs {low} to {high}")


def _check_once(name, places) -> None:
    """Check that no two sequences have one place; -1 is none."""
    seen = set()
    for row in places.tolist():
        own = {place for place in (row if isinstance(row, list) else [row]) if place >= 0}
        if own & seen:
            raise ValueError(f"{name}: got {(own & seen).pop()} twice, needs each at most once")
        seen |= own


def _implementation_args(*args, **kwargs):
    prepared = _prepare(*args, **kwargs)
    return *prepared, prepared[2]


explains("gated_delta_rule_update", op.table, _implementation_args)
