"""One sequence over several ranks, each with a span of its tokens.

What a span does to a state is affine, `S -> M S + h`, with a K by K matrix M and an h of a state's
size. h is the final state from 0. M is the final state from the identity, of the same span with
v = 0. Each rank finds its own M and h, at once with the others. All gather all, and compose those
before their own into the state that they start from. Gradients go back the same way.
"""

from __future__ import annotations

import torch
from torch import distributed

from npu_ops.core.collective import all_gather
from npu_ops.ops.chunk_gated_delta_rule import op


def continued(inputs, group):
    """The operator's inputs with the state before this rank's span, which has gradients.

    Every rank of `group` calls this, also in the backward.
    """
    k, v, g = inputs.k, inputs.v, inputs.g
    batch, length, value_heads, values = v.shape
    keys = k.shape[3]
    of_state = inputs._replace(q=k, state_v_first=False, output_final_state=True)

    def final_state(v, state):
        return op.forward(*of_state._replace(v=v, initial_state=state))[1]

    added = final_state(v, None)
    identity = torch.eye(keys, dtype=g.dtype, device=g.device)
    identity = identity.expand(batch, value_heads, keys, keys).contiguous()
    kept = final_state(v.new_zeros((batch, length, value_heads, keys)), identity)
    gathered = all_gather(torch.cat([kept, added], -1), group)
    state = _compose(*gathered.split([keys, values], -1))[distributed.get_rank(group)]
    state = state.transpose(-1, -2) if inputs.state_v_first else state
    return inputs._replace(initial_state=state)


def _compose(kept, added):
    """The state before every span: all of them, so that every rank's backward meets the others'."""
    states = [torch.zeros_like(added[0])]
    with torch.autocast(added.device.type, enabled=False):
        for m, h in zip(kept[:-1], added[:-1], strict=True):
            states.append(m @ states[-1] + h)
        return torch.stack(states)
