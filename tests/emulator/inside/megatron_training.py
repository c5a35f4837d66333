"""megatron-core's GPTModel trains on NPU tensors with our Triton kernels; prints the losses.

Run by torchrun with two ranks, it prints one line of JSON per way to split the model: each rank
alone with the whole model, then tensor parallelism, then context parallelism.
"""

import collections
import json
import os

import torch
import torch.distributed as dist
from torch_npu.contrib import transfer_to_npu  # noqa: F401  Megatron asks for CUDA by name

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from npu_ops_emulator import triton_driver

LENGTH, VOCABULARY, STEPS = 32, 128, 3


def build(tensor_ranks, context_ranks):
    """Build a model with the same weights for any split: they are drawn whole on
    the CPU, then cut."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=128, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=True,
        mrope_section=[2, 1, 1], use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, tensor_model_parallel_size=tensor_ranks,
        context_parallel_size=context_ranks,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    return GPTModel(
        config=config, transformer_layer_spec=layer, vocab_size=VOCABULARY,
        max_sequence_length=LENGTH, position_embedding_type="mrope", rotary_percent=0.5,
    ).npu()  # fmt: skip


def train(model):
    """Yield the loss of each step."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw).npu()
    positions = torch.randint(0, LENGTH, (3, 2, LENGTH), generator=draw).npu()
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1).npu()
    batch = get_batch_on_this_cp_rank({"tokens": tokens, "attention_mask": causal})
    tokens, mask = batch["tokens"], batch["attention_mask"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss = model(tokens, positions, mask, labels=tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        # Each rank has gradients of its own tokens only.
        for value in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
            group = parallel_state.get_context_parallel_group()
            dist.all_reduce(value, dist.ReduceOp.AVG, group)
        optimizer.step()
        yield loss.item()


def launches():
    return collections.Counter(
        {name: seen.launches for name, seen in triton_driver.statistics().items()}
    )


rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
for tensor_ranks, context_ranks in ((1, 1), (2, 1), (1, 2)):
    before = launches()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks, context_parallel_size=context_ranks
    )
    model_parallel_cuda_manual_seed(0)
    losses = list(train(build(tensor_ranks, context_ranks)))
    parallel_state.destroy_model_parallel()
    if rank == 0:
        print(json.dumps({"losses": losses, "kernels": launches() - before}), flush=True)
dist.destroy_process_group()
