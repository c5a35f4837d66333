"""Arguments for the tests of the chunked gated delta rule."""

import delta_rule_calls
import torch
from support import runner

import npu_ops
from npu_ops.ops.chunk_gated_delta_rule.cases import DIFFERENTIABLE

OP = "chunk_gated_delta_rule"
BY_TOKEN = delta_rule_calls.BY_TOKEN
delta_rule = npu_ops.chunk_gated_delta_rule
run = runner(delta_rule, OP, DIFFERENTIABLE)


def qkv(batch=1, tokens=40, heads=1, value_heads=2, dtype=torch.float32, correlated=False, seed=0):
    """Return arguments by name. Tests share few shapes: each new one needs a compilation."""
    size = batch, tokens, heads, value_heads, 16, 24
    return delta_rule_calls.qkv(*size, dtype, correlated, seed) | {"chunk_size": 16}
