"""Reference of the convolution's decoding step, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_ops.core import indices as check
from npu_ops.core import lengths as lengths_of_packed
from npu_ops.core import make
from npu_ops.ops.causal_conv1d import reference as conv


def causal_conv1d_update(
    x, conv_state, weight, bias, indices, accepted, starts, window, window_indices, pad, silu,
    update,
):  # fmt: skip
    """Return y in fp32 (fp64 if x or weight is); write conv_state and window in place.

    A sequence's rows are the W - 1 rows of its history, from column `accepted - 1` of its slot,
    then its tokens. Without `accepted` the last W - 1 rows are stored; with it, all rows but the
    first.
    """
    width, (slots, _, columns) = weight.shape[1], conv_state.shape
    begins, ends = conv.bounds(x, starts)
    lengths, sequence = ends - begins, make.counted(len(begins), device=x.device)
    slot = sequence if indices is None else indices.long()
    first = torch.zeros_like(slot) if accepted is None else accepted.long() - 1
    good = (slot >= 0) & (slot < slots) & (slot != pad)
    if starts is not None:
        _, fill = lengths_of_packed.nobodys(starts, x.shape[1])
        good &= ~fill.isnan()
    good &= (first >= 0) & (first + width - 1 <= columns)

    # An extra slot, dropped afterwards, takes the writes of skipped sequences.
    pool = F.pad(conv_state, (0, 0, 0, 0, 0, 1))
    place = torch.where(good, slot, slots)
    column = torch.where(good, first, 0)[:, None] + make.counted(width - 1, device=x.device)
    history = pool[place[:, None], :, column].transpose(1, 2)
    # The state of causal_conv1d has one more column, which no tap reads.
    state = F.pad(history, (1, 0))
    rows = conv.all_rows(x, state, starts, width, x.dtype)

    def rows_at(number):
        """Return rows `number` [N, ...] of each sequence's history and tokens, as [N, ..., D]."""
        shape = (-1, *[1] * (number.dim() - 1))
        token = begins.view(shape) + number - (width - 1)
        index = conv.row_index(begins, width, sequence.view(shape), token)
        return rows[index.clamp(max=len(rows) - 1)]

    if update:
        drop = lengths if accepted is None else torch.ones_like(lengths)
        number = drop[:, None] + make.counted(columns, device=x.device)
        kept = (number < (width - 1 + lengths)[:, None]) & (lengths > 0)[:, None]
        new = torch.where(kept[..., None], rows_at(number), pool[place].transpose(1, 2))
        pool[place] = new.transpose(1, 2)
        conv_state.copy_(pool[:-1])
    if window is not None:
        _keep_windows(window, window_indices, good, rows_at, x.shape[1], width)
    y = conv.causal_conv1d(x, weight, bias, None, state, starts, silu)
    y = _without_bad(y, good, slot == pad, begins, ends)
    return lengths_of_packed.without_nobodys(starts, y)[0]


def check_indices(arguments) -> None:
    """Raise ValueError for index values out of range or used twice, as the native kernel does."""
    x, state, slots, starts = arguments.x, arguments.conv_state, arguments.indices, arguments.starts
    check.check_starts("query_start_loc", starts, x.shape[1])
    count = x.shape[0] if starts is None else len(starts) - 1
    if slots is None:
        used = torch.ones(count, dtype=torch.bool, device="cpu")
    else:
        used = slots != arguments.pad
        slots = check.within("conv_state_indices", slots[used], 0, state.shape[0] - 1)
        if arguments.update:
            check.check_distinct("conv_state_indices", slots)
    _check_accepted(arguments, used)
    if arguments.window_indices is not None:
        last, places = arguments.window.shape[0] - 1, arguments.window_indices
        check.check_within("intermediate_state_indices", places[used], -1, last)
        written = places[used & (places >= 0)]
        check.check_distinct("intermediate_state_indices", written.tolist())


def _check_accepted(arguments, used) -> None:
    if arguments.accepted is None:
        return
    most = arguments.conv_state.shape[2] - arguments.weight.shape[1] + 2
    check.check_within("num_accepted_tokens", arguments.accepted[used], 1, most)
    if arguments.starts is not None:
        lengths = arguments.starts.diff()[used]
        if lengths.numel() and lengths.max() > most:
            needs = f"{most} or less with num_accepted_tokens and this width of conv_state"
            raise ValueError(f"query_start_loc: got length {int(lengths.max())}, needs {needs}")


def _keep_windows(window, window_indices, good, rows_at, tokens, width):
    """Write the last W - 1 rows up to and including each token into the token's window."""
    device = good.device
    place = make.counted(len(good), device=device) if window_indices is None else window_indices
    place = torch.where(good & (place >= 0) & (place < len(window)), place, len(window)).long()
    number = make.counted(1, width, device=device) + make.counted(tokens, device=device)[:, None]
    padded = F.pad(window, (0, 0) * 3 + (0, 1))
    padded[place, :tokens] = rows_at(number[None]).transpose(2, 3)
    window.copy_(padded[:-1])


def _without_bad(y, good, skipped, begins, ends):
    """Set y to 0 for skipped sequences and tokens after the last, else to NaN if not `good`."""
    token = make.counted(y.shape[0] * y.shape[1], device=y.device)
    sequence = torch.searchsorted(begins, token, right=True) - 1
    zero = skipped[sequence] | (token >= ends[sequence])
    fill = torch.where(zero, 0.0, float("nan")).to(y.dtype)
    kept = good[sequence] & ~zero
    return torch.where(kept[:, None], y.flatten(0, 1), fill[:, None]).view(y.shape)
