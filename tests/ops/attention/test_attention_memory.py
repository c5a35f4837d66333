"""Memory use of attention, and windows that span several blocks."""

import gc

import pytest
import torch
from attention_calls import qkv, run
from support import (
    assert_all_close,
    copies,
    floats,
)

import npu_ops
from npu_ops.ops.attention import short
from npu_ops.ops.attention.cases import CASES, TOLERANCES


def allocated(tokens, **more):
    case = next(case for case in CASES if case.name == "qwen3-vl-vision-200")
    inputs = case.inputs(torch.float32)
    inputs |= {x: inputs[x].repeat(3, 1, 1)[:tokens] for x in "qkv"}
    inputs |= {"cu_seqlens_q": torch.tensor([0, tokens]), "cu_seqlens_k": None}
    del inputs["cu_seqlens_cpu"]
    gc.collect()
    with copies() as seen:
        npu_ops.attention(**inputs | more)
    return seen.allocated


@pytest.mark.parametrize("lengths", [(700, 700), (300, 900), (900, 300)], ids=str)
@pytest.mark.parametrize("top_left", [False, True])
def test_windows_over_several_blocks(lengths, top_left):
    """The CPU kernel takes a block of queries at a time; the keys of two blocks overlap."""
    inputs = dict(zip("qkv", qkv(1, *lengths, dim=8), strict=True))
    inputs |= {"window": (100, 30), "causal_alignment": "top_left" if top_left else "bottom_right"}
    expected = run(floats(inputs, torch.float64), ("q", "k", "v"), "reference")
    assert_all_close(run(inputs, ("q", "k", "v"), "cpu"), expected, TOLERANCES)


def test_packed_memory_is_linear_in_tokens():
    """Memory for all pairs would grow fourfold. Each pair of sizes uses the same CPU kernel."""
    for tokens in (short.LONGEST_SEEN // 2, 2 * short.LONGEST_SEEN):
        assert allocated(2 * tokens) < 2.2 * allocated(tokens)
