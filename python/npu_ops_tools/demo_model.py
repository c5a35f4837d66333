"""Trains small models of megatron-core with multimodal rotary embedding; prints JSON lines.

A separate program that imports only Megatron and torch. The environment decides whether npu-ops
takes part, as for any other training program.

    python demo_model.py batches.pt --megatron FOLDER --models gpt gpt --dropout 0 0.1 --seeds 0 1
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, HEADS, GROUPS = 128, 4, 2
SECTION = [6, 5, 5]  # T, H and W of the 16 frequencies of a head
GPT = {"num_layers": 2}
# As in Qwen3.5: three layers of Gated Delta Net per attention layer, twice as many value heads.
HYBRID = {
    "num_layers": 4,
    "normalization": "RMSNorm",
    "activation_func": torch.nn.functional.silu,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS = {"gpt": GPT, "hybrid": HYBRID}


class NoTracker:
    """Replaces Megatron's tracker of CUDA generators: dropout uses the default generator."""

    def fork(self, *args, **kwargs):
        return contextlib.nullcontext()

    def is_initialized(self):
        return True

    def add(self, *args, **kwargs):
        return None


def start(device: str) -> None:
    """Initialize a tensor-parallel group of torchrun's processes, or of this process alone.

    Megatron calls CUDA functions: on the CPU they are replaced here, on an NPU by torch_npu.
    """
    on_cpu = device == "cpu"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if on_cpu:
        torch.cuda.current_device = lambda: torch.device("cpu")
    else:
        from torch_npu.contrib import transfer_to_npu  # noqa: F401

        torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = torch.distributed.HashStore() if ranks == 1 else None
    rank = int(os.environ.get("RANK", "0"))
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "hccl", store=store, rank=rank, world_size=ranks
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER = NoTracker()


def build(model: str, vocabulary: int, length: int, dropout: float) -> torch.nn.Module:
    """Build a model, with the same weights each time."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        **MODELS[model],
        deterministic_mode=model == "hybrid" and lacks_kernels(),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=4 * HIDDEN,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        bias_dropout_fusion=True,
        mrope_section=SECTION,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers(config),
        vocab_size=vocabulary,
        max_sequence_length=length,
        position_embedding_type="mrope",
    )


def layers(config):
    """Return the local layer spec, with layers of Gated Delta Net if the config requests them.

    Megatron's own function for such a mix needs Transformer Engine.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    attention = get_gpt_layer_local_spec(normalization=config.normalization)
    if getattr(config, "experimental_attention_variant", None) is None:
        return attention
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    pattern = variants.get_linear_attention_pattern(config)
    linear = gated_delta_net(attention)
    return TransformerBlockSubmodules(
        layer_specs=[linear if is_linear else attention for is_linear in pattern],
        layer_norm=attention.submodules.input_layernorm,
    )


def gated_delta_net(attention):
    """Return a layer spec with Gated Delta Net in place of attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear,
        out_norm=attention.submodules.input_layernorm,
        out_proj=RowParallelLinear,
    )
    linear = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, self_attention=linear)
    )


def lacks_kernels() -> bool:
    """Return whether Megatron's only kernels for Gated Delta Net are fla's, which need a GPU.

    If so, Megatron runs its own PyTorch functions. It has no l2norm, so this function adds one. It
    also sets HAVE_FLA, because otherwise Megatron refuses to build a layer.
    """
    package = importlib.import_module("megatron.core.ssm.gated_delta_net")
    module = sys.modules.get(f"{package.__name__}.common", package)
    rule = module.chunk_gated_delta_rule
    if rule is not None and not rule.__module__.startswith("fla."):
        return False
    module.HAVE_FLA, module.l2norm = True, l2norm
    return True


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype)


def train(data: dict, vocabulary: int, name: str, dropout: float, seed: int, device: str):
    """Yield the loss of each step. Only dropout depends on `seed`."""
    tokens, positions = data["tokens"].to(device), data["positions"].to(device)
    length = positions.shape[-1]
    model = build(name, vocabulary, length, dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    torch.manual_seed(seed)
    for sample, position in zip(tokens, positions, strict=True):
        loss = model(sample[:, :-1], position, causal, labels=sample[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def report(**fields) -> None:
    """Print a line of JSON, in the first process only."""
    if torch.distributed.get_rank() == 0:
        print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="a file with tokens, positions and vocabulary")
    parser.add_argument(
        "--megatron", help="the folder that contains megatron-core, if not installed"
    )
    parser.add_argument("--models", choices=MODELS, nargs="+", required=True, help="one per run")
    parser.add_argument("--dropout", type=float, nargs="+", required=True, help="one per run")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="one per run")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sys.path[:1] = [options.megatron] if options.megatron else []  # exclude this file's own folder
    torch.set_num_threads(1)  # more threads make such a small model slower
    data = torch.load(options.data)
    vocabulary = data.pop("vocabulary")
    start(options.device)
    runs = list(zip(options.models, options.dropout, options.seeds, strict=True))
    for run, (model, dropout, seed) in enumerate(runs):
        for step, loss in enumerate(train(data, vocabulary, model, dropout, seed, options.device)):
            report(model=model, run=run, step=step, loss=loss)
    models = dict.fromkeys(options.models)
    calls = {model: operators(data, vocabulary, model, options.device) for model in models}
    report(end=summary() | {"operators": calls})


def operators(data: dict, vocabulary: int, model: str, device: str) -> dict[str, int]:
    """Count the operators of npu-ops that a training step calls. This program calls none itself."""
    first = {name: values[:1] for name, values in data.items()}
    with Counter() as counter:
        list(train(first, vocabulary, model, 0.1, 0, device))
    return counter.calls


class Counter(TorchDispatchMode):
    """Counts calls of npu-ops' operators. (The profiler does not work: torch_npu replaces it.)"""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "npu_ops":
            self.calls[str(function)] = self.calls.get(str(function), 0) + 1
        return function(*args, **(kwargs or {}))


def summary() -> dict:
    """Return the versions, layers and patches of this run. Imports no module of npu-ops."""
    import megatron.core

    adapters = sys.modules.get("npu_ops_adapters")
    return {
        "megatron": megatron.core.__version__,
        "torch": torch.__version__,
        "layers": {name: model["num_layers"] for name, model in MODELS.items()},
        "threads": torch.get_num_threads(),
        "patches": [dataclasses.asdict(row) for row in adapters.verify()] if adapters else [],
        "compiled": sum(torch._dynamo.utils.counters["frames"].values()),
    }


if __name__ == "__main__":
    main()
