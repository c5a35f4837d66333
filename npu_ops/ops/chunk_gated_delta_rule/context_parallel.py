"""Context parallelism: several ranks share the sequences; each holds a part of their tokens.

The tokens of a rank change a state by an affine map, `S -> M S + h`. M is a K by K matrix, and h
has the size of a state. h is the final state after these tokens if the initial state is 0. M is
their final state if the initial state is the identity and v is 0. All ranks compute their own M and
h at the same time, then gather the maps of all ranks. Each rank composes the maps of earlier ranks
into its initial state. Autograd differentiates these steps.

In the contiguous layout, a rank holds one contiguous part of the packed tokens. Only the sequence
at the end of this part continues on the next rank, so a rank sends one M and one h. In the zigzag
layout each sequence has two chunks on each rank, so a rank sends two M and two h per sequence.
"""

from __future__ import annotations

import torch
from torch import distributed

from npu_ops.core import spans
from npu_ops.core.collective import all_gather
from npu_ops.ops.chunk_gated_delta_rule import op


def continued(inputs, group, layout: str):
    """Return the operator's inputs with the states before this rank's tokens as initial states.

    The states are differentiable. Every rank of `group` must call this, and run the backward.
    """
    if layout == "zigzag":
        return _zigzag(inputs, group)
    if inputs.cu_seqlens is not None:
        return _packed(inputs, group)
    kept, added = _changes(inputs)
    kept, added = _split(all_gather(torch.cat([kept, added], -1), group))
    return _with_state(inputs, _compose(kept, added)[distributed.get_rank(group)])


def _packed(inputs, group):
    """Return the inputs for this rank's contiguous part of packed sequences.

    Only a sequence that began on an earlier rank has an initial state; the others begin on this
    rank.
    """
    span = spans.contiguous(inputs.cu_seqlens, inputs.v.shape[1], group)
    leaving = span.leaving[None, :, None]
    # Tokens of other sequences must not change the state. Their values, even NaN, are not read.
    alone = inputs._replace(
        k=torch.where(leaving[..., None], inputs.k, 0),
        v=torch.where(leaving[..., None], inputs.v, 0),
        g=torch.where(leaving, inputs.g, 0),
        beta=torch.where(leaving, inputs.beta, 0),
        cu_seqlens=None,
    )
    kept, added = _split(all_gather(torch.cat(_changes(alone), -1), group))
    state = _compose(kept, added, span.passes)[distributed.get_rank(group)]
    state = torch.where(span.before > 0, state, 0)
    states = state.new_zeros((inputs.cu_seqlens.shape[0] - 1, *state.shape[1:]))
    states = states.index_copy(0, span.entering, state)
    return _with_state(inputs._replace(cu_seqlens=span.starts), states)


def _zigzag(inputs, group):
    """Return the inputs for the zigzag layout: two chunks of each sequence."""
    starts = spans.zigzag(inputs.cu_seqlens, inputs.v.shape[1], group)
    inputs = inputs._replace(cu_seqlens=starts)
    kept, added = _split(spans.in_order(torch.cat(_changes(inputs), -1), group))
    return _with_state(inputs, spans.of_rank(_compose(kept, added), group))


def _changes(inputs):
    """Return M and h of each sequence (zigzag: of each chunk) on this rank."""
    k, v, g = inputs.k, inputs.v, inputs.g
    batch, length, value_heads = v.shape[:3]
    keys = k.shape[3]
    of_state = inputs._replace(q=k, state_v_first=False, output_final_state=True)

    def final_state(v, state):
        return op.forward(*of_state._replace(v=v, initial_state=state))[1]

    added = final_state(v, None)
    identity = torch.eye(keys, dtype=g.dtype, device=g.device)
    identity = identity.expand(added.shape[0], value_heads, keys, keys).contiguous()
    kept = final_state(v.new_zeros((batch, length, value_heads, keys)), identity)
    return kept, added


def _split(changes):
    """Split `[..., K, K + V]` into M and h."""
    keys = changes.shape[-2]
    return changes.split([keys, changes.shape[-1] - keys], -1)


def _with_state(inputs, state):
    state = state.transpose(-1, -2) if inputs.state_v_first else state
    return inputs._replace(initial_state=state)


def _compose(kept, added, passes=None):
    """Compose the maps of parts (one per rank, or zigzag chunks) into the state before each part.

    Every rank computes all states, so that the collectives in the backward match on all ranks.

    passes: for each part, whether the sequence at its end began in an earlier part; None: always.
    """
    states = [torch.zeros_like(added[0])]
    with torch.autocast(added.device.type, enabled=False):
        for n, (m, h) in enumerate(zip(kept[:-1], added[:-1], strict=True)):
            state = states[-1] if passes is None else torch.where(passes[n], states[-1], 0)
            states.append(m @ state + h)
        return torch.stack(states)
