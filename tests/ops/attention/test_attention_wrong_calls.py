"""Attention: wrong calls, each refused by name."""

import pytest
import torch
from attention_calls import qkv

import npu_ops


def packed_call(**changes):
    q, k, v = (torch.randn(10, n, 8) for n in (4, 2, 2))
    starts = torch.tensor([0, 4, 10])
    return {"q": q, "k": k, "v": v, "layout": "TND", "cu_seqlens_q": starts} | changes


def paged_call(**changes):
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    call = {"q": torch.randn(2, 1, 4, 8), "block_table": table, "seqlens_k": torch.tensor([5, 8])}
    return call | {"k": torch.randn(4, 4, 2, 8), "v": torch.randn(4, 4, 2, 8)} | changes


def dense_call(**changes):
    return dict(zip("qkv", qkv(), strict=True)) | changes


BOOL = torch.bool


@pytest.mark.parametrize(
    "make, changes, error, argument",
    [
        (dense_call, {"q": None}, TypeError, "q"),
        (dense_call, {"q": torch.zeros(2, 9, 4, 16, dtype=torch.int32)}, TypeError, "q"),
        (dense_call, {"k": torch.zeros(2, 9, 2, 16).bfloat16()}, TypeError, "k"),
        (dense_call, {"v": torch.zeros(2, 9, 2, 16).to(torch.float8_e4m3fn)}, TypeError, "v"),
        (dense_call, {"q": torch.zeros(9, 4, 16)}, ValueError, "q"),
        (dense_call, {"q": torch.zeros(3, 9, 4, 16)}, ValueError, "k"),
        (dense_call, {"q": torch.zeros(2, 9, 5, 16)}, ValueError, "k"),
        (dense_call, {"q": torch.zeros(2, 9, 4, 8)}, ValueError, "k"),
        (dense_call, {"v": torch.zeros(2, 8, 2, 16)}, ValueError, "v"),
        (dense_call, {"k": torch.zeros(2, 9, 2, 16, device="meta")}, ValueError, "k"),
        (dense_call, {"layout": "BSDN"}, ValueError, "layout"),
        (dense_call, {"layout": "SBH"}, ValueError, "q"),
        (dense_call, {"cu_seqlens_q": torch.tensor([0, 9])}, ValueError, "layout"),
        (dense_call, {"causal_alignment": "left"}, ValueError, "causal_alignment"),
        (dense_call, {"window": 4}, ValueError, "window"),
        (dense_call, {"window": (4, -2)}, ValueError, "window"),
        (dense_call, {"window": (4, None)}, ValueError, "window"),
        # A mask that could be read in two ways, or is of another kind.
        (dense_call, {"attn_mask": torch.ones(9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 9, 9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 4, 9, 8, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.zeros(9, 9)}, TypeError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2048, 2048, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(9, 9, dtype=BOOL), "is_causal": True},
         ValueError, "is_causal"),
        (dense_call, {"attn_mask": torch.ones(9, 9, dtype=BOOL), "window": (1, 1)},
         ValueError, "window"),
        (dense_call, {"bias": torch.zeros(4, 9, 9)}, ValueError, "bias"),
        (dense_call, {"bias": torch.zeros(9, 9).half()}, TypeError, "bias"),
        (dense_call, {"sinks": torch.zeros(2)}, ValueError, "sinks"),
        (dense_call, {"scale": float("inf")}, ValueError, "scale"),
        (dense_call, {"softcap": 0.0}, ValueError, "softcap"),
        (dense_call, {"softcap": -1.0}, ValueError, "softcap"),
        (dense_call, {"dropout_p": 1.0}, ValueError, "dropout_p"),
        (dense_call, {"dropout_p": -0.1}, ValueError, "dropout_p"),
        (dense_call, {"dropout_p": 0.1, "generator": 3}, TypeError, "generator"),
        (dense_call, {"seqlens_k": torch.tensor([9])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k": torch.tensor([9, 10])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k": torch.tensor([9, -1])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k_cpu": [9, 9]}, ValueError, "seqlens_k_cpu"),
        (dense_call, {"max_seqlen_q": 9}, ValueError, "max_seqlen_q"),
        (packed_call, {"cu_seqlens_q": None}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([4, 10])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0, 4, 11])}, ValueError, "cu_seqlens_q"),
        # sglang #31867: lengths where starts are wanted.
        (packed_call, {"cu_seqlens_q": torch.tensor([4, 6])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0, 6, 4, 10])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0.0, 10.0])}, TypeError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_k": torch.tensor([0, 10])}, ValueError, "cu_seqlens_k"),
        (packed_call, {"cu_seqlens_k": torch.tensor([0, 4, 11])}, ValueError, "cu_seqlens_k"),
        (packed_call, {"cu_seqlens_cpu": [4, 10]}, ValueError, "cu_seqlens_cpu"),
        (packed_call, {"cu_seqlens_cpu": [0, 4, 11]}, ValueError, "cu_seqlens_cpu"),
        (packed_call, {"cu_seqlens_cpu": ([0, 4, 10], [0, 4, 11])}, ValueError, "cu_seqlens_cpu"),
        # One for both, which is that of the queries alone.
        (packed_call, {"k": torch.zeros(12, 2, 8), "v": torch.zeros(12, 2, 8),
                       "cu_seqlens_k": torch.tensor([0, 4, 12]), "cu_seqlens_cpu": [0, 4, 10]},
         ValueError, "cu_seqlens_cpu"),
        (packed_call, {"max_seqlen_q": 5}, ValueError, "max_seqlen_q"),
        (packed_call, {"seqlens_k": torch.tensor([4, 6])}, ValueError, "seqlens_k"),
        (packed_call, {"attn_mask": torch.ones(10, 10, dtype=BOOL)}, ValueError, "attn_mask"),
        (packed_call, {"bias": torch.zeros(10, 10)}, ValueError, "bias"),
        (paged_call, {"seqlens_k": None}, ValueError, "seqlens_k"),
        (paged_call, {"seqlens_k": torch.tensor([5, 9])}, ValueError, "seqlens_k"),
        (paged_call, {"block_table": torch.zeros(2, 2).long()}, TypeError, "block_table"),
        (paged_call, {"block_table": torch.zeros(3, 2).int()}, ValueError, "block_table"),
        (paged_call, {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}, ValueError, "block_table"),
        (paged_call, {"cu_seqlens_k": torch.tensor([0, 5])}, ValueError, "cu_seqlens_k"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_wrong_calls(make, changes, error, argument):
    with pytest.raises(error, match=rf"^{argument}: got .*, needs "):
        npu_ops.attention(**make(**changes))
    assert npu_ops.attention(**make()) is not None
