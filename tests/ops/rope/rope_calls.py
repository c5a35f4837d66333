"""Inputs for the tests of rope."""

import pytest
import torch
from support import every_implementation, twice

import npu_ops
from npu_ops.ops.rope import op
from npu_ops.ops.rope.cases import TOLERANCES, tables

BOTH_ROUND = twice(TOLERANCES)
IMPLEMENTATIONS = every_implementation(op.rotate.forward)
PAIRS = pytest.mark.parametrize("pair_layout", ["half", "interleaved"])
LAYOUTS = ("BSND", "SBND", "BNSD")
rope, rope_freqs = npu_ops.apply_rotary_pos_emb, npu_ops.apply_rotary_pos_emb_freqs


def to_layout(x, layout):
    """Return [B, S, N, D] as a view in another layout."""
    return x.permute(*("BSND".index(axis) for axis in layout))


def qkv(batch=2, tokens=9, q_heads=4, k_heads=2, dim=16, dtype=torch.float32):
    return torch.randn(batch, tokens, q_heads, dim).to(dtype), torch.randn(
        batch, tokens, k_heads, dim
    ).to(dtype)


def table(rows, width, pair_layout="half", half_table=False):
    return tables(torch.arange(rows), width, 1e4, pair_layout, half_table)


def angles(rows, width, pair_layout="half", batch=1):
    """Draw Megatron's freqs: [rows, batch, 1, width] in fp32."""
    half = torch.randn(rows, batch, 1, width // 2)
    return torch.cat((half, half), -1) if pair_layout == "half" else half.repeat_interleave(2, -1)
