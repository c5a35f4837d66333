"""Shared by chunk_gated_delta_rule and chunk_kda: loops over the chunks of sequences on the CPU.

The loop processes one sequence and one chunk at a time, with all heads at once. Each rule passes
its own class `Chunk`:

    chunk = Chunk(x, scratch, b, span, state, queries=True)   tokens `span` of sequence b
    chunk.read()                                              returns their output, `[G, H, c, V]`
    chunk.next_state(state, out)                              writes the state after them to `out`
    chunk.backward(x, scratch, grad_o, state, grad_state, *outputs)
                  writes their gradients, and updates `grad_state` in place: on entry it is the
                  gradient of the state after the chunk, on return that of the state before it

Tensors by value head are `[G, H, ...]`, with G value heads for each of H key heads. Sequences of at
most SHORT tokens are computed token by token, in one call for all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from npu_ops.core import env, indices, make
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS

# The operators of `l2norm`, whose op.py defines them.
_l2norm = torch.ops.npu_ops.l2norm_cpu.default
_l2norm_backward = torch.ops.npu_ops.l2norm_backward_cpu.default
# The operators of `fused_recurrent_gated_delta_rule`.
_recurrent = torch.ops.npu_ops.fused_recurrent_gated_delta_rule_cpu.default
_recurrent_backward = torch.ops.npu_ops.fused_recurrent_gated_delta_rule_backward_cpu.default

# Sequences of at most this many tokens are computed token by token, which is faster than a chunk.
# Only a sequence's own length decides: the other sequences of a call must not change its bits.
SHORT = 4
_TOKENS = ("q", "k", "v", "g", "beta")


class Scratch:
    """Uninitialised fp32 tensors by name. Each call with a name returns the same memory."""

    def __init__(self):
        self._memory = {}

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._memory[name][:size].view(shape)


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    cu_seqlens: torch.Tensor | None
    scale: float
    chunk_size: int
    state_v_first: bool
    normalize: bool

    @property
    def state_shape(self):
        heads, keys = self.q.shape[2:]
        return self.v.shape[2] // heads, heads, keys, self.v.shape[3]

    def read(self, tokens, out):
        """Copy rows of q or k `[c, H, K]` to `out` `[H, c, K]` in fp32; normalize them if set."""
        if self.normalize:
            _l2norm(tokens, EPS, out.transpose(0, 1))
        else:
            out.copy_(tokens.transpose(0, 1))
        return out

    def read_backward(self, gradient, tokens, out):
        """Write the gradient of q or k, like `tokens`, from the gradient of `read`'s output."""
        gradient = gradient.transpose(0, 1)
        if self.normalize:
            _l2norm_backward(gradient, tokens, EPS, out)
        else:
            out.copy_(gradient)

    def sequences(self):
        """Return (index in the batch, first token, end) of each sequence."""
        if self.cu_seqlens is None:
            batch, length = self.q.shape[:2]
            return [(b, 0, length) for b in range(batch)]
        starts = indices.starts_of("cu_seqlens", self.cu_seqlens, self.q.shape[1])
        return [(0, *ends) for ends in itertools.pairwise(starts)]

    def is_whole(self):
        """Return whether all chunks are full."""
        return not any((end - begin) % self.chunk_size for _, begin, end in self.sequences())

    def spans(self, begin, end):
        """Return the slices of the chunks of one sequence."""
        return [
            slice(at, min(at + self.chunk_size, end)) for at in range(begin, end, self.chunk_size)
        ]

    def clear_nobodys(self, *outputs):
        """Write zeros to the rows of tokens after the last packed sequence."""
        for out in outputs if self.cu_seqlens is not None else ():
            out[:, int(self.cu_seqlens[-1]) :].zero_()

    def by_head(self, states, n):
        """Return a view of state n, `[G, H, K, V]`."""
        state = states[n].unflatten(0, (self.q.shape[2], -1)).transpose(0, 1)
        return state.transpose(2, 3) if self.state_v_first else state


class Short:
    """The sequences of at most SHORT tokens, packed; with chunk_size 1, all sequences."""

    def __init__(self, x: Inputs):
        self.x, length = x, x.q.shape[1]
        most = length if x.chunk_size == TOKEN else SHORT
        ends = {n: ends for n, ends in enumerate(x.sequences()) if 0 < ends[2] - ends[1] <= most}
        self._places = ends.keys()
        tokens = [b * length + t for b, begin, end in ends.values() for t in range(begin, end)]
        lengths = [0, *(end - begin for _, begin, end in ends.values())]
        self._tokens, self._sequences = make.indices(tokens), make.indices(list(ends))
        self._starts = make.indices(lengths).cumsum(0)

    def __bool__(self):
        return bool(self._places)

    def __contains__(self, n: int):
        return n in self._places

    def forward(self, initial_state, o, final_state) -> None:
        """Write the rows of o and final_state that belong to these sequences."""
        taken, given = self._taken(o), self._states(final_state)
        _recurrent(*self._inputs(initial_state), taken, given)
        self._put(o, taken)
        if final_state is not None:
            final_state[self._sequences] = given

    def backward(self, grad_o, grad_final_state, initial_state, *gradients) -> None:
        """Write these sequences' rows of the gradients of q, k, v, g, beta and the initial state.

        The gradient of the initial state may be None.
        """
        *of_tokens, of_states = gradients
        q, k, v, g, beta = found = [self._taken(x).float() for x in of_tokens]
        given = self._states(of_states)
        _recurrent_backward(
            self._taken(grad_o), self._states(grad_final_state), *self._inputs(initial_state),
            q, k, v, *self._decays(g), beta[..., None], given,
        )  # fmt: skip
        if self.x.normalize:
            for gradient, x in ((q, self.x.q), (k, self.x.k)):
                # The operator writes the gradient in the dtype of its input, which must be fp32.
                rows = self._taken(x)[0].float()
                _l2norm_backward(gradient[0].clone(), rows, EPS, gradient[0])
        for out, value in zip(of_tokens, found, strict=True):
            self._put(out, value)
        if of_states is not None:
            of_states[self._sequences] = given

    def _inputs(self, initial_state):
        x = self.x
        q, k = (self._taken(tokens).float() for tokens in (x.q, x.k))
        if x.normalize:
            for to, tokens in ((q, x.q), (k, x.k)):
                _l2norm(self._taken(tokens)[0], EPS, to[0])
        v, g, beta = (self._taken(tokens) for tokens in (x.v, x.g, x.beta))
        states = self._states(initial_state)
        return (
            q, k, v, *self._decays(g), beta[..., None], states, self._starts, x.scale,
            x.state_v_first,
        )  # fmt: skip

    @staticmethod
    def _decays(g):
        """Return the recurrent rule's g, gk and gv: g is by head, or by head and key."""
        return (g, None, None) if g.dim() == 3 else (None, g, None)

    def _taken(self, x):
        return x.flatten(0, 1)[self._tokens][None]

    def _put(self, x, value) -> None:
        x.view(-1, *x.shape[2:])[self._tokens] = value[0].to(x.dtype)

    def _states(self, states):
        return None if states is None else states[self._sequences]


def grouped(tokens, heads):
    """Return a view `[G, H, c, V]` of `[c, HV, V]`."""
    return tokens.unflatten(1, (heads, -1)).permute(2, 1, 0, 3)


@torch.autocast("cpu", enabled=False)
def forward(chunk_type, x: Inputs, initial_state, o, final_state, chunk_states=None) -> None:
    """Write o, final_state and chunk_states; the last two may be None."""
    if env.settings.consistent and not x.is_whole():
        return _by_whole_chunks(chunk_type, x, initial_state, o, final_state, chunk_states)
    scratch, heads, row = Scratch(), x.q.shape[2], 0
    short = Short(x)
    if short:
        short.forward(initial_state, o, final_state)
    for n, (b, begin, end) in enumerate(x.sequences()):
        if n in short and chunk_states is None:
            continue
        state = first_state(x, initial_state, n, scratch("state", *x.state_shape))
        if n in short:
            x.by_head(chunk_states, row).copy_(state)
            row += 1
            continue
        for span in x.spans(begin, end):
            if chunk_states is not None:
                x.by_head(chunk_states, row).copy_(state)
                row += 1
            chunk = chunk_type(x, scratch, b, span, state)
            grouped(o[b, span], heads).copy_(chunk.read())
            chunk.next_state(state, state)
        if final_state is not None:
            x.by_head(final_state, n).copy_(state)
    x.clear_nobodys(o)


def _by_whole_chunks(chunk_type, x: Inputs, initial_state, o, final_state, chunk_states) -> None:
    """Run `forward` with each sequence's last chunk padded with zeros.

    The number of rows changes the bits of PyTorch's matrix products, so all chunks must be full.
    """
    length, ends, place, starts = x.q.shape[1], x.sequences(), [], [0]
    nothing = x.q.shape[0] * length  # the row of zeros behind all tokens
    for b, begin, end in ends:
        place += range(b * length + begin, b * length + end)
        place += [nothing] * (-(end - begin) % x.chunk_size)
        starts.append(len(place))
    at = make.indices(place)

    def filled(tokens):
        rows = tokens.flatten(0, 1)
        return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))[at][None]

    found = o.new_empty((1, len(place), *o.shape[2:]))
    whole = dataclasses.replace(
        x, cu_seqlens=make.indices(starts), **{n: filled(getattr(x, n)) for n in _TOKENS}
    )
    forward(chunk_type, whole, initial_state, found, final_state, chunk_states)
    o.view(-1, *o.shape[2:])[at[at < nothing]] = found[0, at < nothing]
    x.clear_nobodys(o)


@torch.autocast("cpu", enabled=False)
def backward(chunk_type, x: Inputs, grad_o, grad_final_state, initial_state, *gradients) -> None:
    """Write the gradients of q, k, v, g, beta and the initial state; the last may be None.

    One sequence at a time, recompute and store the state before each chunk.
    """
    *of_tokens, grad_initial_state = gradients
    scratch, short = Scratch(), Short(x)
    if short:
        short.backward(grad_o, grad_final_state, initial_state, *gradients)
    for n, (b, begin, end) in enumerate(x.sequences()):
        if n in short:
            continue
        spans = x.spans(begin, end)
        states = scratch("states", max(1, len(spans)), *x.state_shape)
        first_state(x, initial_state, n, states[0])
        for i, span in enumerate(spans[:-1]):
            chunk = chunk_type(x, scratch, b, span, states[i], queries=False)
            chunk.next_state(states[i], states[i + 1])
        grad_state = first_state(x, grad_final_state, n, scratch("grad_state", *x.state_shape))
        for i, span in reversed(list(enumerate(spans))):
            chunk = chunk_type(x, scratch, b, span, states[i])
            outputs = [out[b, span] for out in of_tokens]
            chunk.backward(x, scratch, grad_o[b, span], states[i], grad_state, *outputs)
        if grad_initial_state is not None:
            x.by_head(grad_initial_state, n).copy_(grad_state)
    x.clear_nobodys(*of_tokens)


def first_state(x: Inputs, states, n: int, out):
    """Copy state n to `out`, or write zeros if there are no states."""
    return out.zero_() if states is None else out.copy_(x.by_head(states, n))
