"""The short causal convolution before linear attention: depthwise, over time."""

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
    """`act(sum_j weight[:, W - 1 - j] * x[t - j] + bias) + residual`: fla's call as it is.

    Computed in fp32 whatever the dtypes, rounded once. Sequences do not see each other. Gradients
    are the same each time: partial sums, no atomics.

    Args:
        x: `[B, T, D]`, float32, bfloat16, float16 or float64. It may be strided (a slice of a fused
            projection): it is read in place if channels are in one piece.
        weight: `[D, W]` with W 2 to 8, of x's dtype or float32; the last column meets the token
            itself.
        bias: `[D]`, of x's dtype or float32; or None.
        residual: x's shape and dtype, added after the activation; or None.
        initial_state: `[N, D, W]` of x's dtype: the last W tokens before each sequence, of which
            the last W - 1 count. None: zeros.
        output_final_state: return the last W tokens of each sequence, those of the initial state
            included.
        activation: "silu", "swish" (the same) or None.
        cu_seqlens: `[N + 1]` int32 or int64, where packed sequences start and the last one ends,
            for a B of 1; lengths may be 0. None: B sequences of T. What is behind the last one gets
            0, in y and in gradients.
        cp_group: the tokens are a part of those that the ranks of this group have together; all
            call this and go backward together. cu_seqlens is that of the whole sequences, the same
            on every rank. Without initial_state. Final states are those after this rank's part.
        cp_layout: "contiguous": a rank has one span of all tokens, of any length, in the order of
            ranks. "zigzag", Megatron's, with cu_seqlens: each sequence is 2 n equal chunks for n
            ranks; rank r has chunks r and 2 n - 1 - r of each, one behind the other.
        conv_state: a server's pool of states instead of initial and final ones, `[slots, D, L]` of
            any floating dtype, L at least W - 1. A slot's first W - 1 columns are the rows before
            its sequence, as in `causal_conv1d_update`, and those before the next token after it.
            Updated in place; nothing waits for the device.
        conv_state_indices: int32 or int64 `[N]`, each sequence's slot, all different; None: N slots
            in order. With pad_slot_id a sequence begins with zeros and leaves the pool as it is.
        has_initial_state: bool `[N]`: a sequence without one begins with zeros. None: all have.

    Returns:
        y, like x, and the final state `[N, D, W]` of x's dtype, or None. Channels of the state are
        in one piece, which makes it an initial state that needs no copy. Differentiable in x,
        weight, bias, residual and initial_state, also through the final state; once.

    Raises:
        TypeError: a dtype. ValueError: a shape, a device, an activation; cu_seqlens that decrease,
            do not begin with 0 or end behind x (on the CPU; on a device y, the final state,
            and the gradients of x and of the initial state are NaN, and a pool stays as it is);
            with conv_state a required gradient, and on the CPU a slot outside of the pool or one
            twice. RuntimeError: such slots in a compiled call. On a
            device a slot outside is as pad_slot_id.

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
        if x.device.type == "cpu":  # its kernel has one dtype for both
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
            final_state = final_state[1::2]  # behind the later chunk of each sequence
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
    """The public arguments as the operator takes them, but for the states of a pool."""
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
        raise ValueError(f"{name}: got one without conv_state, needs both")
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
