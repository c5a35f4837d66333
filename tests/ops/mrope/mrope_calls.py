"""Inputs for the tests of mrope."""

import pytest
import torch
from support import every_implementation

import npu_ops
from npu_ops.ops.mrope import op
from npu_ops.ops.rope.cases import tables

IMPLEMENTATIONS = every_implementation(op.rotate.forward)
SECTION_LAYOUTS = pytest.mark.parametrize("section_layout", ["chunked", "interleaved"])
PAIRS = pytest.mark.parametrize("pair_layout", ["half", "interleaved"])
LAYOUTS = {"BSND": (0, 1, 2, 3), "SBND": (1, 0, 2, 3), "BNSD": (0, 2, 1, 3)}
mrope, cached = (
    npu_ops.apply_multimodal_rotary_pos_emb,
    npu_ops.apply_multimodal_rotary_pos_emb_cached,
)


def qkv(batch=2, tokens=9, q_heads=4, k_heads=2, dim=16, dtype=torch.float32):
    return torch.randn(batch, tokens, q_heads, dim).to(dtype), torch.randn(
        batch, tokens, k_heads, dim
    ).to(dtype)


def axes_table(*shape, width=16, pair_layout="half", half_table=False):
    """Return cos and sin [3, *shape, width] of random positions."""
    return tables(torch.randint(1000, (3, *shape)), width, 1e4, pair_layout, half_table)
