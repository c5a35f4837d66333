"""The short depthwise causal convolution over time that precedes linear attention."""

from __future__ import annotations

import torch

from npu_ops.core import check, lengths, spans
from npu_ops.core.registry import explains
from npu_ops.ops.causal_conv1d import arguments, context_parallel, layout, op, pool

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    cp_layout: str = "contiguous",
    conv_state: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `act(sum_j weight[:, W - 1 - j] * x[t - j] + bias) + residual`.

    It accepts calls written for fla's function. It computes in fp32 (float64: in float64) and
    rounds once. It never mixes sequences. Gradients are deterministic: partial sums, no atomics.

    Args:
        x: `[B, T, D]`, float32, bfloat16, float16 or float64. A strided view with contiguous
            channels (a slice of a fused projection) is read without a copy.
        weight: `[D, W]` with W 2 to 8, of x's dtype or float32; the last column multiplies the
            current token.
        bias: `[D]`, of x's dtype or float32; or None.
        residual: x's shape and dtype, added after the activation; or None.
        initial_state: `[N, D, W]` of x's dtype: the last W tokens before each sequence; only the
            last W - 1 matter. None: zeros.
        output_final_state: return the last W tokens of each sequence, counting those of the initial
            state.
        activation: "silu", "swish" (the same) or None.
        cu_seqlens: `[N + 1]` int32 or int64: the starts of packed sequences, then the end of the
            last; needs B = 1. Sequences may be empty. None: B sequences of T. Tokens behind the
            last sequence get 0, in y and in gradients.
        cp_group: process group whose ranks share the tokens; every rank must call this function and
            run its backward. cu_seqlens then describes the whole sequences, the same on every rank.
            Excludes initial_state. Final states are those after this rank's part.
        cp_layout: "contiguous": each rank has one contiguous part of all tokens, of any length, in
            the order of ranks. "zigzag" (Megatron's, needs cu_seqlens): for n ranks each sequence
            is cut into 2 n equal chunks; rank r has chunks r and 2 n - 1 - r of each, one after the
            other.
        conv_state: a server's pool of states, used in place of initial and final states: `[slots,
            D, L]` of any floating dtype, L at least W - 1. The first W - 1 columns of a slot are
            the rows before its sequence, as in `causal_conv1d_update`; they are overwritten with
            the rows before its next token. Nothing waits for the device.
        conv_state_indices: int32 or int64 `[N]`, the slot of each sequence, all different; None: N
            slots in order. A sequence with pad_slot_id begins with zeros and leaves the pool
            unchanged.
        has_initial_state: bool `[N]`: False starts a sequence with zeros. None: all True.

    Returns:
        y, like x, and the final state `[N, D, W]` of x's dtype, or None. Channels of the state are
        contiguous, so it can be passed as an initial state without a copy. Differentiable once in
        x, weight, bias, residual and initial_state, also through the final state.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: one of these:
            - A shape, a device or an activation is invalid.
            - cu_seqlens on the CPU decrease, do not begin with 0 or end behind x. On a device, y,
              the final state, and the gradients of x and of the initial state are NaN instead, and
              a pool stays unchanged.
            - conv_state is given and a gradient is required.
            - On the CPU, a slot is outside the pool or used twice. On a device, a slot outside the
              pool acts like pad_slot_id.
        RuntimeError: in a compiled call on the CPU, a slot is outside the pool or used twice.

    Source: fla `fla.modules.conv.causal_conv1d`; the layer is Mamba's (Gu and Dao, 2023).
    """
    inputs = _prepare(
        x, weight, bias, residual=residual, initial_state=initial_state,
        output_final_state=output_final_state, activation=activation, cu_seqlens=cu_seqlens,
        cp_group=cp_group, cp_layout=cp_layout, conv_state=conv_state,
        conv_state_indices=conv_state_indices, has_initial_state=has_initial_state,
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
    if conv_state is not None:
        slots = pool.Slots(conv_state, conv_state_indices, pad_slot_id, x, cu_seqlens)
        before = slots.read(weight.shape[1], x.dtype, has_initial_state)
        inputs = inputs._replace(initial_state=before, output_final_state=True)
        if x.device.type == "cpu":  # the CPU kernel needs one dtype for x and state
            inputs = inputs._replace(x=x.to(before.dtype), residual=_as(residual, before.dtype))
        y, final_state = op.forward(*inputs)
        slots.write(final_state)
        return y.to(x.dtype), None
    if cp_group is not None and cu_seqlens is not None:
        starts, before = context_parallel.packed(
            x, weight.shape[1], cu_seqlens, cp_group, cp_layout
        )
        y, final_state = causal_conv1d(
            x, weight, bias, residual=residual, initial_state=before, activation=activation,
            output_final_state=output_final_state, cu_seqlens=starts,
        )  # fmt: skip
        if cp_layout == "zigzag" and output_final_state:
            final_state = final_state[1::2]  # states after the later chunk of each sequence
        return y, final_state
    if cp_group is not None:
        before = context_parallel.initial_state(x, weight.shape[1], cp_group)
        inputs = inputs._replace(initial_state=before)
    y, final_state = op.forward(*inputs)
    return y, final_state if output_final_state else None


def _prepare(
    x, weight, bias=None, *, residual=None, initial_state=None, output_final_state=False,
    activation=None, cu_seqlens=None, cp_group=None, cp_layout="contiguous", conv_state=None,
    conv_state_indices=None, has_initial_state=None, pad_slot_id=-1,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs, without the states of a pool."""
    spans.check(cp_group, cp_layout, initial_state, cu_seqlens)
    shared = cp_group is not None
    _check(x, weight, bias, residual, initial_state, activation, cu_seqlens, shared)
    if not shared and residual is not None and residual.requires_grad:
        (residual,) = lengths.without_nobodys(cu_seqlens, residual)
    if conv_state is not None:
        check.tensor("conv_state", conv_state)
        check.alone("conv_state", initial_state=initial_state, cp_group=cp_group)
        pool.check_call(
            x, weight, bias, residual, cu_seqlens, conv_state, conv_state_indices,
            has_initial_state, pad_slot_id,
        )  # fmt: skip
        if output_final_state:
            raise ValueError("output_final_state: got True with conv_state, needs False")
    elif conv_state_indices is not None or has_initial_state is not None:
        name = "has_initial_state" if conv_state_indices is None else "conv_state_indices"
        raise ValueError(f"{name}: got a value without conv_state, needs both")
    silu = activation is not None
    return op.forward.Inputs(
        x, weight, bias, residual, initial_state, cu_seqlens, silu, bool(output_final_state)
    )


def _as(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)


def _check(x, weight, bias, residual, initial_state, activation, cu_seqlens, shared) -> None:
    arguments.check_rows(x, weight, bias, activation, cu_seqlens, shared)
    arguments.check_like_x("residual", residual, x, x.shape, "x's shape")
    shape = torch.Size((layout.sequences(x, cu_seqlens), *weight.shape))
    arguments.check_like_x("initial_state", initial_state, x, shape, "[N, D, W], here")


explains("causal_conv1d", op.forward, _prepare)
