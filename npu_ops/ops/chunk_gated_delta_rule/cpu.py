"""The chunked gated delta rule on the CPU: torch's operators, and native code for the gates.

One sequence and one chunk at a time, all heads at once: what a chunk needs stays in the cache. In
fp32: CPUs without matrix units take longer in bf16.

With S the state before a chunk, D_ij the decay from token j to i >= j, `since` that from the start
of the chunk to a token and `until` that from a token to its end:

    A = (1 + L)^-1, L = beta (K K^T) D below the diagonal        P = (Q K^T) D up to the diagonal
    R = beta (V - since K S)      N = A R      O = since Q S + P N      S' = decay S + K^T (until N)

Sequences of a few tokens go token by token, in one call for all of them.

Tensors by value head are `[G, H, ...]` for G value heads to each of H heads: a product with what
the heads share is one for each g. Keys and queries are stacked, `[H, 2c, K]`: one product serves
both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from npu_ops.core import env, indices, make
from npu_ops.core.registry import from_native
from npu_ops.ops.chunk_gated_delta_rule import token_by_token
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS

_gates = from_native(
    "chunk_gated_delta_rule_gates_cpu(Tensor recalled, Tensor g, Tensor beta, Tensor(a!) inverse, "
    "Tensor(b!)? attention, Tensor(c!) decays) -> ()"
)()
_gates_backward = from_native(
    "chunk_gated_delta_rule_gates_backward_cpu(Tensor recalled, Tensor g, Tensor beta, "
    "Tensor grad_solve, Tensor grad_attention, Tensor grad_beta_in, Tensor grad_total_in, "
    "Tensor kept, Tensor faded, Tensor(a!) grad_recalled, Tensor(b!) grad_g, "
    "Tensor(c!) grad_beta) -> ()"
)()
# Those of `l2norm`, whose op.py defines them.
_l2norm = torch.ops.npu_ops.l2norm_cpu.default
_l2norm_backward = torch.ops.npu_ops.l2norm_backward_cpu.default
# Those of `fused_recurrent_gated_delta_rule`.
_recurrent = torch.ops.npu_ops.fused_recurrent_gated_delta_rule_cpu.default
_recurrent_backward = torch.ops.npu_ops.fused_recurrent_gated_delta_rule_backward_cpu.default

# That of `gated_delta_rule_update`.
_step = torch.ops.npu_ops.gated_delta_rule_update_cpu.default

# Tokens of a sequence up to which that takes less time than a chunk. Other sequences do not matter:
# they must not change the result.
SHORT = 4


class _Scratch:
    """Uninitialised fp32 tensors by name. A name's memory is the same each time."""

    def __init__(self):
        self._memory = {}

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._memory[name][:size].view(shape)


@dataclasses.dataclass(frozen=True)
class _Inputs:
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
        """Rows of q or k `[c, H, K]` to `out` `[H, c, K]` in fp32, over their norms if wanted."""
        if self.normalize:
            _l2norm(tokens, EPS, out.transpose(0, 1))
        else:
            out.copy_(tokens.transpose(0, 1))
        return out

    def read_backward(self, gradient, tokens, out):
        """From the gradient of what `read` gave to that of q or k, like `tokens`."""
        gradient = gradient.transpose(0, 1)
        if self.normalize:
            _l2norm_backward(gradient, tokens, EPS, out)
        else:
            out.copy_(gradient)

    def sequences(self):
        """(index in the batch, first token, end) of each sequence."""
        if self.cu_seqlens is None:
            batch, length = self.q.shape[:2]
            return [(b, 0, length) for b in range(batch)]
        starts = indices.starts_of("cu_seqlens", self.cu_seqlens, self.q.shape[1])
        return [(0, *ends) for ends in itertools.pairwise(starts)]

    def is_whole(self):
        """Whether no chunk has fewer tokens than others."""
        return not any((end - begin) % self.chunk_size for _, begin, end in self.sequences())

    def spans(self, begin, end):
        """Those of a sequence's chunks."""
        return [
            slice(at, min(at + self.chunk_size, end)) for at in range(begin, end, self.chunk_size)
        ]

    def clear_nobodys(self, *outputs):
        """Write zeros to the rows of tokens behind the last sequence."""
        for out in outputs if self.cu_seqlens is not None else ():
            out[:, int(self.cu_seqlens[-1]) :].zero_()

    def by_head(self, states, n):
        """A view of state n, `[G, H, K, V]`."""
        state = states[n].unflatten(0, (self.q.shape[2], -1)).transpose(0, 1)
        return state.transpose(2, 3) if self.state_v_first else state


class _Short:
    """The sequences of a few tokens, one behind the other."""

    def __init__(self, x: _Inputs):
        self.x, length = x, x.q.shape[1]
        ends = {n: ends for n, ends in enumerate(x.sequences()) if 0 < ends[2] - ends[1] <= SHORT}
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
        """Write their rows of o and final_state."""
        taken, given = self._taken(o), self._states(final_state)
        _recurrent(*self._inputs(initial_state), taken, given)
        self._put(o, taken)
        if final_state is not None:
            final_state[self._sequences] = given

    def backward(self, grad_o, grad_final_state, initial_state, *gradients) -> None:
        """Write their rows of the gradients: of q, k, v, g, beta, and the states unless None."""
        *of_tokens, of_states = gradients
        q, k, v, g, beta = found = [self._taken(x).float() for x in of_tokens]
        given = self._states(of_states)
        _recurrent_backward(
            self._taken(grad_o), self._states(grad_final_state), *self._inputs(initial_state),
            q, k, v, g, None, None, beta[..., None], given,
        )  # fmt: skip
        if self.x.normalize:
            for gradient, x in ((q, self.x.q), (k, self.x.k)):
                rows = self._taken(x)[0].float()  # it writes what is of x's dtype
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
            q, k, v, g, None, None, beta[..., None], states, self._starts, x.scale, x.state_v_first,
        )  # fmt: skip

    def _taken(self, x):
        return x.flatten(0, 1)[self._tokens][None]

    def _put(self, x, value) -> None:
        x.view(-1, *x.shape[2:])[self._tokens] = value[0].to(x.dtype)

    def _states(self, states):
        return None if states is None else states[self._sequences]


def _grouped(tokens, heads):
    """A view `[G, H, c, V]` of `[c, HV, V]`."""
    return tokens.unflatten(1, (heads, -1)).permute(2, 1, 0, 3)


def _flat(x):
    return x.flatten(0, 1)


def _each(a, b, out):
    """`a @ b` for each g of what has one, to `out`."""
    for g in range(out.shape[0]):
        torch.bmm(a if a.dim() == 3 else a[g], b[g], out=out[g])
    return out


def _add_each(total, a, b):
    """Add `a[g] @ b[g]` to `total[g]` for each g. a or total may have no dimension g."""
    for g in range(b.shape[0]):
        (total if total.dim() == 3 else total[g]).baddbmm_(a if a.dim() == 3 else a[g], b[g])


class _Chunk:
    """The tokens `span` of sequence b: what the state before them makes of them."""

    def __init__(self, x: _Inputs, scratch, b, span, state, *, queries=True):
        self.count = count = span.stop - span.start
        group, heads, keys, values = x.state_shape
        self.g, self.beta = x.g[b, span], x.beta[b, span]
        rows = 2 * count if queries else count
        self.kq = scratch("kq", heads, rows, keys)
        self.k = self.kq[:, :count]
        self.q_given, self.k_given = x.q[b, span], x.k[b, span]
        x.read(self.k_given, self.k)
        if queries:
            x.read(self.q_given, self.kq[:, count:]).mul_(x.scale)  # in fp32
        self.v = scratch("v", group, heads, count, values)
        self.v.copy_(_grouped(x.v[b, span], heads))
        self.products = torch.bmm(
            self.kq, self.k.transpose(1, 2), out=scratch("products", heads, rows, count)
        )
        square = group, heads, count, count
        self.inverse = scratch("inverse", *square)
        self.attention = scratch("attention", *square) if queries else None
        self.decays = scratch("decays", 3, group, heads, count)
        _gates(self.products, self.g, self.beta, self.inverse, self.attention, self.decays)
        self.recalled = _each(self.kq, state, scratch("recalled", group, heads, rows, values))
        since, _, beta = self.decays[..., None]
        missed = torch.addcmul(self.v, since, self.recalled[:, :, :count], value=-1).mul_(beta)
        self.o = self.recalled[:, :, count:] * since if queries else None
        self.solved = scratch("solved", *self.v.shape)
        torch.bmm(_flat(self.inverse), _flat(missed), out=_flat(self.solved))
        self.written = scratch("written", *self.v.shape)
        torch.mul(self.solved, self.decays[1, ..., None], out=self.written)

    def read(self):
        """O, `[G, H, c, V]`."""
        _flat(self.o).baddbmm_(_flat(self.attention), _flat(self.solved))
        return self.o

    def decay(self):
        """Of a state over the whole chunk."""
        return self.decays[0, :, :, -1, None, None]

    def next_state(self, state, out):
        torch.mul(state, self.decay(), out=out)
        _add_each(out, self.k.transpose(1, 2), self.written)
        return out


@torch.autocast("cpu", enabled=False)
def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state, chunk_states=None,
):  # fmt: skip
    """Compute the forward pass on the CPU: write o, final_state and chunk_states.

    The operator's arguments. final_state and chunk_states may be None: they are not written then.
    """
    if chunk_size == TOKEN:
        inputs = q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize
        return token_by_token.forward(_step, *inputs, o, final_state)
    x = _Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    if env.settings.consistent and not x.is_whole():
        return _by_whole_chunks(x, initial_state, o, final_state, chunk_states)
    scratch, heads, row = _Scratch(), x.q.shape[2], 0
    short = _Short(x)
    if short:
        short.forward(initial_state, o, final_state)
    for n, (b, begin, end) in enumerate(x.sequences()):
        if n in short and chunk_states is None:
            continue
        state = _first_state(x, initial_state, n, scratch("state", *x.state_shape))
        if n in short:
            x.by_head(chunk_states, row).copy_(state)
            row += 1
            continue
        for span in x.spans(begin, end):
            if chunk_states is not None:
                x.by_head(chunk_states, row).copy_(state)
                row += 1
            chunk = _Chunk(x, scratch, b, span, state)
            _grouped(o[b, span], heads).copy_(chunk.read())
            chunk.next_state(state, state)
        if final_state is not None:
            x.by_head(final_state, n).copy_(state)
    x.clear_nobodys(o)


def _by_whole_chunks(x: _Inputs, initial_state, o, final_state, chunk_states) -> None:
    """The same, with zeros behind each sequence that fill its last chunk: PyTorch's products have
    other bits where there are fewer rows."""
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
    chunk_gated_delta_rule(
        *map(filled, (x.q, x.k, x.v, x.g, x.beta)), initial_state, make.indices(starts), x.scale,
        x.chunk_size, x.state_v_first, x.normalize, found, final_state, chunk_states,
    )  # fmt: skip
    o.view(-1, *o.shape[2:])[at[at < nothing]] = found[0, at < nothing]
    x.clear_nobodys(o)


chunk_gated_delta_rule_prefill = chunk_gated_delta_rule


@torch.autocast("cpu", enabled=False)
def chunk_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Writes the gradients that are not None. Keeps the state before each chunk of a sequence."""
    chunk_size = token_by_token.chunk_size_of_backward(chunk_size)
    x = _Inputs(q, k, v, g, beta, cu_seqlens, scale, chunk_size, state_v_first, normalize)
    scratch, short = _Scratch(), _Short(x)
    if short:
        short.backward(
            grad_o, grad_final_state, initial_state, grad_q, grad_k, grad_v, grad_g, grad_beta,
            grad_initial_state,
        )  # fmt: skip
    for n, (b, begin, end) in enumerate(x.sequences()):
        if n in short:
            continue
        spans = x.spans(begin, end)
        states = scratch("states", max(1, len(spans)), *x.state_shape)
        _first_state(x, initial_state, n, states[0])
        for i, span in enumerate(spans[:-1]):
            chunk = _Chunk(x, scratch, b, span, states[i], queries=False)
            chunk.next_state(states[i], states[i + 1])
        grad_state = _first_state(x, grad_final_state, n, scratch("grad_state", *x.state_shape))
        for i, span in reversed(list(enumerate(spans))):
            chunk = _Chunk(x, scratch, b, span, states[i])
            outputs = [out[b, span] for out in (grad_q, grad_k, grad_v, grad_g, grad_beta)]
            _chunk_backward(chunk, x, scratch, grad_o[b, span], states[i], grad_state, *outputs)
        if grad_initial_state is not None:
            x.by_head(grad_initial_state, n).copy_(grad_state)
    x.clear_nobodys(grad_q, grad_k, grad_v, grad_g, grad_beta)


def _first_state(x, states, n, out):
    return out.zero_() if states is None else out.copy_(x.by_head(states, n))


def _chunk_backward(
    chunk, x, scratch, grad_o_tokens, state, grad_state, grad_q, grad_k, grad_v, grad_g, grad_beta
):
    """Writes a chunk's gradients, and takes `grad_state` from after the chunk to before it."""
    group, heads, count, values = like = chunk.v.shape
    keys, square = chunk.k.shape[2], (group, heads, count, count)
    grad_o = scratch("grad_o", *like).copy_(_grouped(grad_o_tokens, heads))
    # O = ... + P N, S' = ... + K^T (until N)
    grad_attention = scratch("grad_attention", *square)
    torch.bmm(_flat(grad_o), _flat(chunk.solved).transpose(1, 2), out=_flat(grad_attention))
    grad_solved = scratch("grad_solved", *like)
    torch.bmm(_flat(chunk.attention).transpose(1, 2), _flat(grad_o), out=_flat(grad_solved))
    grad_written = _each(chunk.k, grad_state, scratch("grad_written", *like))
    since, until, beta = chunk.decays
    grad_solved.addcmul_(grad_written, until[..., None])
    kept = until * (chunk.solved * grad_written).sum(-1)
    # N = A R
    grad_missed = scratch("grad_missed", *like)
    torch.bmm(_flat(chunk.inverse).transpose(1, 2), _flat(grad_solved), out=_flat(grad_missed))
    grad_solve = scratch("grad_solve", *square)
    torch.bmm(_flat(grad_missed), _flat(chunk.solved).transpose(1, 2), out=_flat(grad_solve))
    # R = beta (V - since K S), O = since Q S + ...
    by_k, by_q = chunk.recalled.split(count, 2)
    grad_values = grad_missed * beta[..., None]
    grad_recalled = torch.cat((-grad_values, grad_o), 2).mul_(
        torch.cat((since, since), 2)[..., None]
    )
    through_k = since * (grad_missed * by_k).sum(-1)
    grad_betas = (grad_missed * chunk.v).sum(-1) - through_k
    grad_since = since * (grad_o * by_q).sum(-1) - beta * through_k
    _grouped(grad_v, heads).copy_(grad_values)
    # S, the gates, and the products K K^T and Q K^T
    grad_k_written = scratch("grad_k_written", heads, count, keys)
    torch.bmm(chunk.written[0], grad_state[0].transpose(1, 2), out=grad_k_written)
    _add_each(grad_k_written, chunk.written[1:], grad_state[1:].transpose(2, 3))
    faded = since[:, :, -1] * (state * grad_state).sum((2, 3))
    grad_state.mul_(chunk.decay())
    _add_each(grad_state, chunk.kq.transpose(1, 2), grad_recalled)
    grad_products = scratch("grad_products", heads, 2 * count, 2 * count)
    _gates_backward(
        chunk.products, chunk.g, chunk.beta, grad_solve, grad_attention, grad_betas, grad_since,
        kept, faded, grad_products, grad_g, grad_beta,
    )  # fmt: skip
    grad_kq = torch.bmm(grad_products, chunk.kq, out=scratch("grad_kq", heads, 2 * count, keys))
    _add_each(grad_kq, grad_recalled, state.transpose(2, 3))
    x.read_backward(grad_kq[:, :count].add_(grad_k_written), chunk.k_given, grad_k)
    x.read_backward(grad_kq[:, count:].mul_(x.scale), chunk.q_given, grad_q)
