"""Compare Megatron's logits of packed sequences with transformers', with NPU_OPS_CONSISTENT=1.

python consistent_megatron.py MEGATRON MODEL DTYPE [DEVICE]

MODEL: a tiny qwen3, qwen3_5 or qwen3_moe. Prints how many logits differ, how many there are, and
how many weights have wrong gradients in fp32. On an NPU, Megatron calls torch_npu's norm and
activation, as with MindSpeed. Sequences are not packed if Megatron's Gated Delta Net does not
support that.
"""

from __future__ import annotations

import inspect
import sys

import torch
import transformers

HEADS, GROUPS, DIM, HIDDEN, LAYERS, WORDS = 4, 2, 64, 128, 2, 96
LENGTHS = (57, 1, 42)
LINEAR = {
    "linear_num_value_heads": 32,  # a multiple of AVX-512's width, see docs/invariance.md
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
ROTATED = {"qwen3": 1.0, "qwen3_5": 0.25, "qwen3_moe": 1.0}  # the rotated share of a head
EXPERTS, CHOSEN, WIDTH = 8, 3, 96


def theirs(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return a transformers model with random norm weights.

    They are around 1, but around 0 in norms that multiply by 1 + weight.
    """
    made, model, own = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "qwen3_5": (
            transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM,
            LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        ),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
            {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True,
             "moe_intermediate_size": WIDTH},
        ),
    }[kind]  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": ROTATED[kind]}
    config = made(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, head_dim=DIM,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        rope_parameters=rope, tie_word_embeddings=False, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    model = model._from_config(config, dtype=dtype).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            centre = 0 if is_less_one(kind, name) else 1
            weight.copy_(centre + torch.randint(-16, 17, weight.shape) / 64)
    model.set_attn_implementation("npu_ops")
    return model


def is_less_one(kind: str, name: str) -> bool:
    """Return whether this norm multiplies by 1 + weight."""
    return kind == "qwen3_5" and "linear_attn" not in name


def megatrons(kind: str, weights: dict, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from npu_ops_tools import demo_model

    own = {
        "qwen3": {},
        "qwen3_5": {
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0],
            "attention_output_gate": True, **LINEAR,
        },
        "qwen3_moe": {
            "num_moe_experts": EXPERTS, "moe_router_topk": CHOSEN, "moe_ffn_hidden_size": WIDTH,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall" if hasattr(torch, "npu") else "allgather",
            "moe_router_dtype": "fp32",
        },
    }[kind]  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, kv_channels=DIM,
        num_attention_heads=HEADS, num_query_groups=GROUPS, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, add_bias_linear=False,
        qk_layernorm=True, layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, bf16=dtype is torch.bfloat16, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, **own,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=own.get("num_moe_experts"), normalization="RMSNorm", qk_layernorm=True
    )
    if kind == "qwen3_5":
        spec = TransformerBlockSubmodules(
            layer_specs=[demo_model.gated_delta_net(spec), spec],
            layer_norm=spec.submodules.input_layernorm,
        )
    model = GPTModel(
        config=config, vocab_size=WORDS, max_sequence_length=max(LENGTHS), rotary_base=1000000,
        transformer_layer_spec=spec, rotary_percent=ROTATED[kind],
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    left = model.to(dtype).eval().load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all("extra_state" in key for key in left.missing_keys)
    return model


def renamed(kind: str, weights: dict, one: int = 1) -> dict:
    """Return transformers' weights, or their gradients, under Megatron's names.

    one: is added to the weights of norms that multiply by 1 + weight in transformers, because
    Megatron's multiply by the weight; 0 for gradients.
    """
    weights = {n: w + one * is_less_one(kind, n) if "norm" in n else w for n, w in weights.items()}
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
        mixer = linear_attention(own) if "linear_attn.A_log" in own else attention(own)
        found = (
            mixer
            | experts_or_one(own)
            | {
                "input_layernorm.weight": own["input_layernorm"],
                "pre_mlp_layernorm.weight": own["post_attention_layernorm"],
            }
        )
        made |= {f"decoder.layers.{layer}.{name}": x for name, x in found.items()}
    return made


def experts_or_one(own: dict) -> dict:
    if "mlp.gate" not in own:
        first = torch.cat((own["mlp.gate_proj"], own["mlp.up_proj"]))
        return {"mlp.linear_fc1.weight": first, "mlp.linear_fc2.weight": own["mlp.down_proj"]}
    found = {"mlp.router.weight": own["mlp.gate"]}
    for expert in range(EXPERTS):
        of_it = f"mlp.experts.local_experts.{expert}"
        found[f"{of_it}.linear_fc1.weight"] = own["mlp.experts.gate_up_proj"][expert]
        found[f"{of_it}.linear_fc2.weight"] = own["mlp.experts.down_proj"][expert]
    return found


def attention(own: dict) -> dict:
    """Return attention's weights in Megatron's order: per group q, its gates, k and v."""
    q, k, v = (own[f"self_attn.{x}_proj"].view(GROUPS, -1, HIDDEN) for x in "qkv")
    gated = q.shape[1] == 2 * DIM * (HEADS // GROUPS)
    parts = q.view(GROUPS, -1, 2 if gated else 1, DIM, HIDDEN).unbind(2)
    return {
        "self_attention.linear_qkv.weight": torch.cat(
            [*(part.flatten(1, 2) for part in parts), k, v], 1
        ).flatten(0, 1),
        "self_attention.linear_proj.weight": own["self_attn.o_proj"],
        "self_attention.q_layernorm.weight": own["self_attn.q_norm"],
        "self_attention.k_layernorm.weight": own["self_attn.k_norm"],
    }


def linear_attention(own: dict) -> dict:
    own = {name.removeprefix("linear_attn."): weight for name, weight in own.items()}
    found = {
        "in_proj.weight": torch.cat([own[f"in_proj_{part}"] for part in ("qkv", "z", "b", "a")]),
        "conv1d.weight": own["conv1d"],
        "out_norm.weight": own["norm"],
        "out_proj.weight": own["out_proj"],
        "A_log": own["A_log"],
        "dt_bias": own["dt_bias"],
    }
    return {f"self_attention.{name}": weight for name, weight in found.items()}


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


def packs(kind: str) -> bool:
    """Return whether this Megatron supports packed sequences, in Gated Delta Net too."""
    if kind != "qwen3_5":
        return True
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return "thd" in inspect.getsource(inspect.unwrap(GatedDeltaNet.forward))


def of_each(model, ids, device: str) -> torch.Tensor:
    """Return Megatron's logits, computed sequence by sequence."""
    logits = []
    for part in ids.split(LENGTHS, 1):
        length = part.shape[1]
        later = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        logits.append(model(part, torch.arange(length, device=device)[None], later))
    return torch.cat(logits, 1)


def wrong_gradients(kind: str, model, other, expected, found) -> int:
    """Return how many weights have a gradient off by more than 1e-5 of that weight's largest."""
    draw = torch.Generator().manual_seed(1)
    seeds = torch.randn(found.shape, generator=draw).to(found)
    (expected * seeds).sum().backward()
    (found * seeds).sum().backward()
    right = renamed(kind, {name: p.grad for name, p in model.named_parameters()}, one=0)
    off = {name: p.grad - right[name] for name, p in other.named_parameters()}
    return sum(int(x.abs().max() > 1e-5 * right[name].abs().max()) for name, x in off.items())


def main(megatron: str, kind: str, dtype: str, device: str = "cpu") -> None:
    sys.path.insert(0, megatron)
    from npu_ops_tools import demo_model

    demo_model.start(device)
    if device == "npu":
        as_mindspeed_does()
    with torch.no_grad():
        model = theirs(kind, getattr(torch, dtype))
        other = megatrons(kind, renamed(kind, model.state_dict()), model.dtype).to(device)
    model = model.to(device)
    ids = torch.randint(WORDS, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    ids = ids.to(device)
    expected = torch.cat([model(input_ids=part).logits for part in ids.split(LENGTHS, 1)], 1)
    if packs(kind):
        found = other(ids, positions, None, packed_seq_params=packed(device))
    else:
        found = of_each(other, ids, device)
    wrong = wrong_gradients(kind, model, other, expected, found) if dtype == "float32" else 0
    print(int((found != expected).sum()), found.numel(), wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
