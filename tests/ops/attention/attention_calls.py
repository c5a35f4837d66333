"""Helpers for the tests of attention."""

import pytest
import torch
from support import evaluate, every_implementation, forced, implementations

import npu_ops
from npu_ops import AttentionSpec, plan_attention
from npu_ops.core.compare import assert_close
from npu_ops.ops.attention import op
from npu_ops.ops.attention.cases import DIFFERENTIABLE, TOLERANCES

OPS = ("attention", "attention_backward")
CLOSE = TOLERANCES[torch.float32]
IMPLEMENTATIONS = every_implementation(op.forward)
DEVICES = pytest.mark.parametrize(
    "device", sorted({p.values[1] for p in implementations(op.forward.table)})
)


def moved(inputs, device):
    """Return `inputs` on a device, except the tensors that must stay on the host."""
    on_host = ("cu_seqlens_cpu", "seqlens_k_cpu")
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and name not in on_host else value
        for name, value in inputs.items()
    }


def wanted(inputs, names=DIFFERENTIABLE):
    given = [name for name in names if inputs.get(name) is not None]
    return () if inputs.get("block_table") is not None else tuple(given)


def run(inputs, wrt=(), implementation=None):
    """Return outputs and gradients, by `implementation` or, if it is None, by dispatch's choice."""
    torch.manual_seed(11)
    if implementation is None:
        return evaluate(npu_ops.attention, inputs, wrt)
    with forced(implementation, *OPS):
        return evaluate(npu_ops.attention, inputs, wrt)


def runs(implementation, inputs, wrt):
    """Return whether an implementation supports this call, forward and backward."""
    with torch.set_grad_enabled(bool(wrt)):
        asking = {n: v.detach().requires_grad_() if n in wrt else v for n, v in inputs.items()}
        rows = npu_ops.explain("attention", **asking)
    forward = next(row for row in rows if row.implementation == implementation)
    needs_lse = wrt and inputs.get("return_lse")
    return forward.why_not in (None, *(f"{i} comes first" for i in ORDER)) and not (
        needs_lse and implementation == "aclnn"
    )


ORDER = [implementation.name for implementation in op.forward.table.implementations]


def compare(actual, expected, dtype):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        there = expected[name]
        nothing = there == -torch.inf  # lse of a query that sees no key
        assert torch.equal(value.cpu() == -torch.inf, nothing), name
        tidy = [x.cpu().masked_fill(nothing, 0) for x in (value, there)]
        assert_close(name, *tidy, TOLERANCES[dtype])


def seen(sees, lq, lk):
    return torch.tensor([[sees(i, j, lq, lk) for j in range(lk)] for i in range(lq)])


def qkv(batch=2, queries=9, keys=None, heads=4, kv_heads=2, dim=16, seed=0):
    """Draw q `[B, Sq, N, D]`, k and v `[B, Sk, Nkv, D]`."""
    draw = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    return (
        torch.randn(batch, queries, heads, dim, generator=draw),
        torch.randn(batch, keys, kv_heads, dim, generator=draw),
        torch.randn(batch, keys, kv_heads, dim, generator=draw),
    )


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def chosen(**fields):
    return plan_attention(AttentionSpec(**fields))
