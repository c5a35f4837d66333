"""Apply verl's `apply_npu_patches()` on top of npu-ops's patches, and train Qwen3 with both.

Runs on the emulated NPU. Prints the states of npu-ops's patches, the name of the function that
Qwen3's MLP runs, and the loss and gradient norm, patched on the NPU and unpatched on the CPU.
"""

from __future__ import annotations

import json

import npu_ops_adapters
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from verl.models.transformers import npu_patch

CONFIG = Qwen3Config(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def step(model, tokens) -> list[float]:
    model(input_ids=tokens, labels=tokens).loss.backward()
    loss = model(input_ids=tokens, labels=tokens).loss.item()
    squares = [p.grad.float().square().sum() for p in model.parameters()]
    return [loss, torch.stack(squares).sum().sqrt().item()]


def main() -> None:
    npu_ops_adapters.revert()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, tokens)
    npu_ops_adapters.apply()
    npu_patch.apply_npu_patches()
    states = {f"{row.target} ({row.op})": row.sentence for row in npu_ops_adapters.verify()}
    model.zero_grad()
    found = step(model.to("npu"), tokens.to("npu"))
    mlp = modeling_qwen3.Qwen3MLP.forward.__name__
    print(json.dumps({"states": states, "mlp": mlp, "cpu": expected, "npu": found}))


main()
