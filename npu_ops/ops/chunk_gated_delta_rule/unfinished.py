"""States that carry the tokens of their unfinished chunk, so that a sequence can be cut anywhere.

To compute a chunk, all of its tokens are needed. So a carried state is the state before the last
chunk, with that chunk's tokens in additional rows. Code that copies, caches or clears a state then
does the same to its tokens. The next call computes that chunk again, with the new tokens appended.

A carried state is `[HV, V + R, K]`, values first, R = `unfinished_rows(K, V)`. Below the V rows of
the state are CHUNK rows, the keys of CHUNK tokens. The remaining rows, read as one vector, hold the
tokens' values, their g, their beta, and the number of tokens, 0 to CHUNK. Unused elements are 0, so
zeros are the state of a new sequence.
"""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import lengths, make
from npu_ops.ops.chunk_gated_delta_rule import op
from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK, counts_of, unfinished_rows


@dataclasses.dataclass(frozen=True)
class _Held:
    """Carried states taken apart: the states, and the tokens of their unfinished chunks.

    state `[N, HV, V, K]`, k `[N, CHUNK, H, K]`, v `[N, CHUNK, HV, V]`, g and beta `[N, CHUNK, HV]`,
    count `[N]`.
    """

    state: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    count: torch.Tensor

    @classmethod
    def of(cls, carried: torch.Tensor, heads: int, values: int, dtype: torch.dtype):
        sequences, value_heads = carried.shape[:2]
        state, keys, rest = carried.split((values, CHUNK, carried.shape[2] - values - CHUNK), 2)
        v, g, beta = rest.flatten(2)[:, :, : CHUNK * (values + 2)].split(
            (CHUNK * values, CHUNK, CHUNK), 2
        )
        return cls(
            state,
            keys[:, :: value_heads // heads].transpose(1, 2).to(dtype),
            v.view(sequences, value_heads, CHUNK, values).transpose(1, 2).to(dtype),
            g.transpose(1, 2),
            beta.transpose(1, 2),
            counts_of(carried, values),
        )

    def carried(self) -> torch.Tensor:
        """Return the carried states as one tensor."""
        dtype, value_heads = self.state.dtype, self.state.shape[1]
        values, keys = self.state.shape[2:]
        run = torch.cat(
            (
                self.v.transpose(1, 2).flatten(2).to(dtype),
                self.g.transpose(1, 2),
                self.beta.transpose(1, 2),
                self.count.to(dtype)[:, None, None].expand(-1, value_heads, 1),
            ),
            2,
        )
        rows = unfinished_rows(keys, values) - CHUNK
        run = torch.nn.functional.pad(run, (0, rows * keys - run.shape[2]))
        of_heads = self.k.transpose(1, 2).repeat_interleave(value_heads // self.k.shape[2], 1)
        return torch.cat((self.state, of_heads.to(dtype), run.unflatten(2, (rows, keys))), 2)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Rows of a packed call in which each sequence's carried tokens precede its new tokens.

    starts: `[N + 1]`, the starts of its sequences, then the end of the last.
    old: `[N, CHUNK]`, the rows of the carried tokens.
    new: `[T]`, the rows of the new tokens.
    rows: the number of rows. It is also the row of absent tokens, which is cut off.
    """

    starts: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    rows: int

    @classmethod
    def of(cls, starts: torch.Tensor, tokens: int, count: torch.Tensor):
        sequences = count.shape[0]
        rows, device = sequences * CHUNK + tokens, count.device
        begins = torch.cat((count.new_zeros(1), (count + starts.diff()).cumsum(0)))
        place = make.counted(CHUNK, device=device)
        old = torch.where(place < count[:, None], begins[:-1, None] + place, rows)
        token = make.counted(tokens, device=device)
        sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        known = sequence.clamp(max=sequences - 1)  # later tokens are placed after the last sequence
        new = token - starts[known] + begins[known] + count[known]
        return cls(begins, *(x.clamp(0, rows) for x in (old, new)), rows)

    def together(self, held: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
        """Return carried and new tokens in one `[1, rows, ...]`; zeros if none are carried."""
        out = given.new_zeros((self.rows + 1, *given.shape[1:]))
        if held is not None:
            out[self.old.flatten()] = held.flatten(0, 1).to(out.dtype)
        out[self.new] = given
        return out[None, : self.rows]


def forward(inputs):
    """Return o and the carried states after the tokens, from the operator's inputs.

    inputs: `op.forward.Inputs`, whose initial_state holds carried states, or is None.
    """
    x = inputs
    tokens = tuple(t.flatten(0, 1) for t in (x.q, x.k, x.v, x.g, x.beta))
    count, (heads, keys), (value_heads, values) = tokens[0].shape[0], x.q.shape[2:], x.v.shape[2:]
    starts = x.cu_seqlens
    if starts is None:
        starts = make.counted(x.q.shape[0] + 1, device=x.q.device) * x.q.shape[1]
    carried = x.initial_state
    if carried is None:
        rows = values + unfinished_rows(keys, values)
        carried = x.g.new_zeros((starts.shape[0] - 1, value_heads, rows, keys))
    held = _checked(_Held.of(carried, heads, values, x.k.dtype), starts, count)
    starts = starts.long().clamp(0, count).cummax(0).values  # keeps invalid starts in bounds
    layout = _Layout.of(starts, count, held.count)
    q, k, v, g, beta = (
        layout.together(of, given)
        for of, given in zip((None, held.k, held.v, held.g, held.beta), tokens, strict=True)
    )
    o, _, before = op.prefill(
        q, k, v, g, beta, held.state, layout.starts, x.scale, x.chunk_size, x.state_v_first,
        x.normalize,
    )  # fmt: skip
    o = torch.cat((o[0], o.new_zeros(1, *o.shape[2:])))[layout.new].view(x.v.shape)
    (o,) = lengths.without_nobodys(x.cu_seqlens, o)
    return o, _after(held, layout, before, k[0], v[0], g[0], beta[0]).carried()


def _checked(held: _Held, starts, tokens: int) -> _Held:
    """Return `held` with integer counts, and NaN states where a count or the starts are invalid.

    The argument checks do not read these values from a device.
    """
    right = (held.count >= 0) & (held.count <= CHUNK) & (held.count == held.count.floor())
    state = held.state.masked_fill(
        ~(right & lengths.are_right(starts, tokens))[:, None, None, None], torch.nan
    )
    return dataclasses.replace(held, state=state, count=held.count.where(right, 0).long())


def _after(held: _Held, layout: _Layout, before, *tokens) -> _Held:
    """Return the carried states after the call.

    They hold the state before each sequence's last chunk, and the tokens of that chunk.
    """
    ends, counts = layout.starts[1:], layout.starts.diff()
    chunks = (counts + (CHUNK - 1)) // CHUNK
    last = (chunks.cumsum(0) - 1).clamp(0)
    state = torch.where((counts > 0)[:, None, None, None], before[last], held.state)
    first = layout.starts[:-1] + (chunks - 1).clamp(0) * CHUNK
    row = first[:, None] + make.counted(CHUNK, device=first.device)
    there = row < ends[:, None]
    row = row.clamp(0, max(layout.rows - 1, 0))
    kept = (x[row].masked_fill(~there.view(*there.shape, *[1] * (x.dim() - 1)), 0) for x in tokens)
    return _Held(state, *kept, ends - first)
