"""Build Qwen3.5's text model from Megatron's layers, on the CPU, for --custom-model-provider-path.

The model is the reference for MindSpeed-Bridge's with the same arguments. It uses Megatron's own
GatedDeltaNet with Megatron's PyTorch functions, and the weight names that MindSpeed-Bridge saves.
"""

from __future__ import annotations

import copy

import torch
import transformers
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


class CentredNorm(torch.nn.Module):
    """RMSNorm with 1 + weight. Megatron has none except Transformer Engine's."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **options):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class Text(MegatronModule):
    """Holds a GPTModel under the name it has in MindSpeed-Bridge's model."""

    def __init__(self, model: GPTModel):
        super().__init__(config=model.config)
        self.language_model = model
        self.pre_process, self.post_process = model.pre_process, model.post_process
        self.share_embeddings_and_output_weights = False

    def set_input_tensor(self, tensor) -> None:
        self.language_model.set_input_tensor(tensor)

    def forward(self, **inputs):
        return self.language_model(**inputs)

    def sharded_state_dict(self, *args, **options):
        """Drop the extra states: Megatron's own layers have none."""
        names = super().sharded_state_dict(*args, **options)
        return {name: x for name, x in names.items() if not name.endswith("_extra_state")}


def provide(pre_process: bool = True, post_process: bool = True) -> Text:
    """Build the model for Relax's arguments."""
    without_fla()
    args = get_args()
    theirs = transformers.AutoConfig.from_pretrained(args.hf_checkpoint).text_config
    config = core_transformer_config_from_args(args)
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim"):
        setattr(config, f"linear_{name}", getattr(theirs, f"linear_{name}"))
    for name in ("num_key_heads", "num_value_heads"):
        setattr(config, f"linear_{name}", getattr(theirs, f"linear_{name}"))
    config.hetereogenous_dist_checkpoint = True  # weights' names contain the layer's number
    kinds = [layer(kind == "linear_attention") for kind in theirs.layer_types]
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(kinds, CentredNorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    return Text(model)


def without_fla() -> None:
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.chunk_gated_delta_rule = rule
    gated_delta_net.l2norm = l2norm


def rule(*inputs, use_qk_l2norm_in_kernel: bool, **options):
    """Apply the rule, and normalise q and k in it a second time, as MindSpeed-Bridge does.

    The second time changes only short vectors, which the epsilon has kept from length 1.
    """
    options["use_qk_l2norm_in_kernel"] = True
    return gated_delta_net.torch_chunk_gated_delta_rule(*inputs, **options)


def l2norm(x, dim: int = -1, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)


def layer(is_delta_net: bool) -> ModuleSpec:
    spec = copy.deepcopy(
        gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = CentredNorm
    if is_delta_net:
        parts.self_attention = ModuleSpec(
            module=gated_delta_net.GatedDeltaNet,
            submodules=gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=CentredNorm, out_proj=RowParallelLinear
            ),
        )
        names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
        parts.sharded_state_dict_keys_map = parts.sharded_state_dict_keys_map | names
    else:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = CentredNorm
    return spec
