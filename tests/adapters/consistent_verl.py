"""Compare a tiny Qwen3 with experts on the emulated NPU with and without verl's patches for NPUs.

With the patches, experts and SwiGLU are torch_npu's operators; NPU_OPS_CONSISTENT=1 replaces them.

python consistent_verl.py DTYPE DEVICE

Prints how many logits differ, how many there are, and how many weights have gradients that differ
by more than 2 % of that weight's largest gradient.
"""

from __future__ import annotations

import sys

import torch
from consistent_megatron import LENGTHS, WORDS, theirs
from transformers.models.qwen3_moe import modeling_qwen3_moe


def step(model, ids) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    draw = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=draw).to(logits)).sum().backward()
    return logits.detach(), [p.grad.float() for p in model.parameters()]


def main(dtype: str, device: str) -> None:
    with torch.no_grad():
        model = theirs("qwen3_moe", getattr(torch, dtype)).to(device)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (1, sum(LENGTHS)), generator=draw).to(device)
    expected, right = step(model, ids)
    from verl.models.transformers import npu_patch

    npu_patch.apply_npu_patches()
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock.forward
    assert block is npu_patch.qwen3_moe_sparse_moe_block_forward_npu
    found, grads = step(model, ids)
    off = [(a - b).abs().max() > 0.02 * b.abs().max() for a, b in zip(grads, right, strict=True)]
    print(int((found != expected).sum()), found.numel(), int(sum(off)))


main(*sys.argv[1:])
