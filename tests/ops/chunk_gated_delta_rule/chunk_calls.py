"""What the tests of the chunked gated delta rule share."""

import functools

import torch
from support import (
    evaluate,
    forced,
)

import npu_ops
from npu_ops.ops.chunk_gated_delta_rule.cases import DIFFERENTIABLE

OP = "chunk_gated_delta_rule"
BY_TOKEN = ("q", "k", "v", "g", "beta")
delta_rule = npu_ops.chunk_gated_delta_rule


def run(implementation, inputs):
    """The outputs, and gradients of everything that is there."""
    with forced(implementation, OP):
        return evaluate(
            delta_rule, inputs, tuple(n for n in DIFFERENTIABLE if inputs.get(n) is not None)
        )


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def qkv(batch=1, tokens=40, heads=1, value_heads=2, dtype=torch.float32, correlated=False, seed=0):
    """Arguments by name, with a decay, beta and a state. Few shapes: each is compiled once."""
    draw = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=draw)
    key = functools.partial(torch.rand if correlated else torch.randn, generator=draw)
    return {
        "q": unit(key(batch, tokens, heads, 16)).to(dtype),
        "k": unit(key(batch, tokens, heads, 16)).to(dtype),
        "v": normal(batch, tokens, value_heads, 24).to(dtype),
        "g": -normal(batch, tokens, value_heads).abs() / 4,
        "beta": normal(batch, tokens, value_heads).sigmoid(),
        "initial_state": normal(batch, value_heads, 16, 24),
        "output_final_state": True,
        "chunk_size": 16,
    }
