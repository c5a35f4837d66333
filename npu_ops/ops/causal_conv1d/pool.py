"""A server's pool of states: read the initial states of a prefill, and write its final states."""

from __future__ import annotations

import torch
from torch.nn import functional

from npu_ops.core import check, indices, lengths, library, make
from npu_ops.ops.causal_conv1d import arguments, layout


def check_call(
    x, weight, bias, residual, cu_seqlens, conv_state, conv_state_indices, has_initial_state,
    pad_slot_id,
) -> None:  # fmt: skip
    """Check the pool and its slots; on the CPU also the slots' values.

    The other arguments must be checked already.
    """
    check.floating("conv_state", conv_state)
    check.same_device("conv_state", conv_state, "x", x)
    channels, width = weight.shape
    fits = conv_state.dim() == 3 and conv_state.shape[1] == channels
    if not fits or conv_state.shape[2] < width - 1:
        raise check.shape("conv_state", conv_state, f"[slots, {channels}, L], L from {width - 1}")
    count = layout.sequences(x, cu_seqlens)
    if has_initial_state is not None:
        check.tensor("has_initial_state", has_initial_state)
        check.same_device("has_initial_state", has_initial_state, "x", x)
        if has_initial_state.dtype != torch.bool or has_initial_state.shape != (count,):
            raise check.shape("has_initial_state", has_initial_state, f"bool [{count}]")
    _check_slots(conv_state, conv_state_indices, pad_slot_id, count, x)
    read = {
        "x": x, "weight": weight, "bias": bias, "residual": residual, "cu_seqlens": cu_seqlens,
        "conv_state_indices": conv_state_indices, "has_initial_state": has_initial_state,
    }  # fmt: skip
    check.writable({"conv_state": conv_state}, read)
    check.no_gradient(read | {"conv_state": conv_state}, " with conv_state")


def _check_slots(conv_state, slots, pad_slot_id, count, x) -> None:
    if slots is None:
        if count > conv_state.shape[0]:
            raise check.shape("conv_state", conv_state, f"at least {count} slots")
        return
    arguments.check_integers("conv_state_indices", slots, x, count)
    last = conv_state.shape[0] - 1
    if library.readable(slots):
        used = slots[slots != pad_slot_id]
        indices.check_distinct(
            "conv_state_indices", indices.within("conv_state_indices", used, 0, last)
        )
    elif slots.device.type == "cpu":  # traced: make the check a part of the compiled graph
        inside = (slots >= 0) & (slots <= last) & _distinct(slots)
        needs = (
            f"conv_state_indices: got a slot twice or out of range, needs 0 to {last}, all "
            "different"
        )
        torch._assert_async((inside | (slots == pad_slot_id)).all(), needs)


def _distinct(slots) -> torch.Tensor:
    """Return bool `[N]`: whether no other sequence has the same slot.

    Compares all pairs, because slots are few.
    """
    return (slots[:, None] == slots).sum(1) == 1


class Slots:
    """The slots of a call's sequences in the pool. No method waits for the device."""

    def __init__(self, conv_state, slots, pad_slot_id: int, x, cu_seqlens):
        self._pool = conv_state
        count = layout.sequences(x, cu_seqlens)
        if slots is None:
            slots = make.counted(count, device=conv_state.device)
            self._real = torch.ones_like(slots, dtype=torch.bool)
        else:
            self._real = (slots >= 0) & (slots < conv_state.shape[0]) & (slots != pad_slot_id)
        self._places = torch.where(self._real, slots, 0).long()
        self._kept = self._real
        if cu_seqlens is not None:  # invalid starts change no state
            self._kept = self._real & lengths.are_right(cu_seqlens, x.shape[1])

    def read(self, width: int, x_dtype: torch.dtype, has_initial_state):
        """Return the initial states `[N, D, W]`: zeros for a sequence without one.

        Their dtype is wide enough for x and the pool, so no state is rounded on the way.
        """
        dtype = torch.promote_types(self._pool.dtype, x_dtype)
        if not self._pool.shape[0]:
            shape = len(self._places), self._pool.shape[1], width
            return self._pool.new_zeros(shape, dtype=dtype)
        there = self._real if has_initial_state is None else self._real & has_initial_state
        before = self._pool[..., : width - 1][self._places]
        before = torch.where(there[:, None, None], before, 0).to(dtype)
        return functional.pad(before, (1, 0))  # a state has W columns; no filter reads the first

    def write(self, final_state) -> None:
        """Write the last rows of each sequence to its slot.

        A sequence whose state must not be written repeats the write of the first sequence whose
        state is. If no state is written, a slot gets its own values again.
        """
        if not self._places.numel() or not self._pool.shape[0]:
            return
        pool = self._pool[..., : final_state.shape[2] - 1]
        first = self._kept.int().argmax()
        rows = torch.where(self._kept, make.counted(len(self._places), device=pool.device), first)
        places = self._places[rows]
        values = final_state[rows][..., 1:].to(pool.dtype)
        pool[places] = torch.where(self._kept.any(), values, pool[places])
