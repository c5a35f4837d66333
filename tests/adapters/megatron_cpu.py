"""Build small GPTModels of any megatron-core release, and run them on the CPU with gloo."""

from __future__ import annotations

import inspect

import torch
from npu_ops_tools import demo_model


class NoTracker(demo_model.NoTracker):
    """A stand-in for Megatron's RNG tracker, with the methods that checkpointing calls."""

    def get_states(self):
        return {}

    def set_states(self, states):
        return None


def start(store=None, rank: int = 0, ranks: int = 1) -> None:
    """Start a gloo process group, and replace Megatron's CUDA calls so that it runs on the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    store = store or torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random

    fused_softmax.get_default_causal_mask = causal_mask
    parallel_state.initialize_model_parallel(1, 1)
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER = NoTracker()
    # Activation checkpointing in Megatron saves the generators of the CPU and of CUDA.
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def causal_mask(length: int) -> torch.Tensor:
    """Return a causal mask on the CPU; Megatron makes one on "cuda"."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def gpt(position: str, spec=None, config=None, **changes):
    """Return a two-layer GPTModel with rotary embedding on half of each head, in fp32."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    config = config or transformer_config(position, **changes)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec or demo_model.layers(config),
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type=position,
        rotary_percent=0.5,
    )
    return randomise_biases(model)


def multi_latent():
    """Return a model with multi-latent attention: q and k heads of 24, value heads of 16."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "v_head_dim": 16}
    settings = {"qk_pos_emb_head_dim": 8, "rope_type": "rope", "normalization": "RMSNorm"}
    settings |= {"num_query_groups": 4, "multi_latent_attention": True} | latent
    config = transformer_config("rope", MLATransformerConfig, **settings)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    return gpt("rope", spec, config)


def transformer_config(position: str, kind=None, **config):
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "mrope_section": [2, 1, 1] if position == "mrope" else None,
    }
    return (kind or TransformerConfig)(**(settings | config))


def hybrid(**config):
    """Return a model with three layers of Gated Delta Net and one of attention.

    Without kernels its layers use Megatron's PyTorch code.
    """
    config = demo_model.HYBRID | {"deterministic_mode": demo_model.lacks_kernels()} | config
    return gpt("rope", **config)


def randomise_biases(model):
    """Draw the biases: they start as zeros, which would hide a lost bias."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def step(model, batch: int = 2, length: int = 32) -> dict[str, torch.Tensor]:
    """Return the loss and the gradient of every parameter, by name."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (batch, length), generator=draw)
    positions = torch.arange(length).expand(batch, length)
    if model.config.mrope_section:  # positions differ per sample and axis, as with images
        positions = torch.randint(0, length, (3, batch, length), generator=draw)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    torch.manual_seed(2)
    loss = model(tokens, positions, mask, labels=tokens).mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def call(function, *args, **kwargs):
    """Call `function` with those keywords that its version has."""
    parameters = inspect.signature(function).parameters
    return function(*args, **{name: v for name, v in kwargs.items() if name in parameters})
