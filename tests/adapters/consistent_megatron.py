"""A tiny Qwen3 with NPU_OPS_CONSISTENT=1: Megatron's logits of packed sequences, and transformers'.

python consistent_megatron.py MEGATRON DTYPE [DEVICE]

Prints how many logits differ, and how many there are. On an NPU Megatron calls torch_npu's norm and
activation, as MindSpeed has it do.
"""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HEADS, GROUPS, DIM, HIDDEN, LAYERS, WORDS = 4, 2, 64, 128, 2, 96
LENGTHS = (57, 1, 42)


def theirs(dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model, with norms of weights that are not all 1."""
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, head_dim=DIM,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    model.set_attn_implementation("npu_ops")
    return model


def megatrons(weights: dict, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, kv_channels=DIM,
        num_attention_heads=HEADS, num_query_groups=GROUPS, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, add_bias_linear=False,
        qk_layernorm=True, layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, bf16=dtype is torch.bfloat16, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config=config, vocab_size=WORDS, max_sequence_length=max(LENGTHS), rotary_base=1000000,
        transformer_layer_spec=get_gpt_layer_local_spec(
            normalization="RMSNorm", qk_layernorm=True
        ),
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    left = model.to(dtype).eval().load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all("extra_state" in key for key in left.missing_keys)
    return model


def renamed(weights: dict) -> dict:
    """transformers' weights by Megatron's names; the rows of a group's q, k and v are together."""
    names = {
        "model.embed_tokens": "embedding.word_embeddings",
        "lm_head": "output_layer",
        "model.norm": "decoder.final_layernorm",
    }
    made = {f"{to}.weight": weights[f"{name}.weight"] for name, to in names.items()}
    for layer in range(LAYERS):
        own = {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(prefix := f"model.layers.{layer}.")
        }
        qkv = [own[f"self_attn.{x}_proj"].view(GROUPS, -1, HIDDEN) for x in "qkv"]
        found = {
            "self_attention.linear_qkv": torch.cat(qkv, 1).flatten(0, 1),
            "self_attention.linear_proj": own["self_attn.o_proj"],
            "self_attention.q_layernorm": own["self_attn.q_norm"],
            "self_attention.k_layernorm": own["self_attn.k_norm"],
            "input_layernorm": own["input_layernorm"],
            "pre_mlp_layernorm": own["post_attention_layernorm"],
            "mlp.linear_fc1": torch.cat((own["mlp.gate_proj"], own["mlp.up_proj"])),
            "mlp.linear_fc2": own["mlp.down_proj"],
        }
        made |= {f"decoder.layers.{layer}.{name}.weight": x for name, x in found.items()}
    return made


def as_mindspeed_does() -> None:
    import torch_npu
    from megatron.core.transformer import mlp

    class Norm(torch.nn.RMSNorm):
        def forward(self, x):
            return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]

    torch.nn.RMSNorm = Norm
    mlp.bias_swiglu_impl = lambda x, *others: torch_npu.npu_swiglu(x, dim=-1)


def packed(device: str):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(device)
    of_both = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return PackedSeqParams(
        qkv_format="thd", max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS), **of_both
    )


@torch.no_grad()
def main(megatron: str, dtype: str, device: str = "cpu") -> None:
    sys.path.insert(0, megatron)
    from npu_ops_tools import demo_model

    demo_model.start(device)
    if device == "npu":
        as_mindspeed_does()
    model = theirs(getattr(torch, dtype))
    other = megatrons(renamed(model.state_dict()), model.dtype).to(device)
    model = model.to(device)
    ids = torch.randint(WORDS, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    ids = ids.to(device)
    expected = [model(input_ids=part).logits for part in ids.split(LENGTHS, 1)]
    found = other(ids, positions, None, packed_seq_params=packed(device))
    different = found != torch.cat(expected, 1)
    print(int(different.sum()), different.numel())


if __name__ == "__main__":
    main(*sys.argv[1:])
