"""Check rotary embeddings, and attention up to them, against vLLM's own PyTorch code.

vllm-ascend's kernels use Triton extensions that the interpreter lacks.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import types

import torch

from vllm_cpu.checks import Calls, close
from vllm_cpu.functions import raised
from vllm_cpu.layers import rows
from vllm_cpu.versions import WORKER

HOME = "vllm_ascend.ops.rotary_embedding"
LAYERS = "vllm.model_executor.layers"
CHECKS = []
TOKENS, POSITIONS = 9, 64


def check(function):
    CHECKS.append(function)
    return function


def bare(dotted, **members):
    """Return an instance of a vLLM class without running `__init__`, which needs a server."""
    made = pkgutil.resolve_name(dotted)
    made = made.__new__(made)
    torch.nn.Module.__init__(made)
    vars(made).update(members)
    return made


def embedding(kind, head, width, section=None, interleaved=True, neox=True):
    """Return a rotary embedding. kind: a class of vllm-ascend's or vLLM's."""
    common = pkgutil.resolve_name(f"{LAYERS}.rotary_embedding.common")
    native = functools.partial(common.ApplyRotaryEmb.forward_static, is_neox_style=neox)
    angles = torch.arange(POSITIONS)[:, None] * 2.0 ** -torch.arange(width // 2)
    return bare(
        kind, head_size=head, rotary_dim=width, mrope_section=section, is_neox_style=neox,
        mrope_interleaved=interleaved, cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1),
        apply_rotary_emb=types.SimpleNamespace(forward_native=native),
    )  # fmt: skip


OURS, PLAIN = f"{HOME}.AscendMRotaryEmbedding", f"{HOME}.AscendRotaryEmbedding"
THEIRS = f"{LAYERS}.rotary_embedding.MRotaryEmbedding"
FORMS = (
    (128, 128, [24, 20, 20], True, True),  # Qwen3-VL
    (64, 64, [16, 8, 8], False, True),  # as Qwen2-VL
    (128, 64, [11, 11, 10], True, True),  # Qwen3.5 rotates part of a head
)


def steps():
    """Return positions of text, and of images."""
    generator = torch.Generator().manual_seed(0)
    return torch.arange(TOKENS), torch.randint(POSITIONS, (3, TOKENS), generator=generator)


@check
def rope_of_text():
    operator = importlib.import_module(HOME).rope_forward_oot
    native = importlib.import_module(f"{LAYERS}.rotary_embedding.base").RotaryEmbedding
    positions = steps()[1][0]
    for head, width, neox in ((64, 64, True), (128, 64, True), (64, 64, False)):
        made = embedding(THEIRS, head, width, neox=neox)
        q, k = rows(TOKENS, 4 * head, dtype=torch.float32), rows(TOKENS, head, dtype=torch.float32)
        table = made.cos_sin_cache
        with Calls() as counted:
            found = operator(positions, q, k, table, head, width, neox)
        assert counted.found == ["rope"]
        right = native.forward_static(positions, q, k, head, width, table, neox)
        for one, other in zip(found, right, strict=True):
            close(one, other, 1e-5)


@check
def positions_of_other_tokens_are_not_ours():
    """Too few positions could be mistaken for more heads of fewer tokens."""
    ours = importlib.import_module("npu_ops_adapters.vllm.rope").ours
    made = embedding(THEIRS, 64, 64)
    q, k = rows(8, 4 * 64), rows(8, 64)
    error = raised(ours, torch.arange(4), q, k, made.cos_sin_cache, 64, 64, True)
    assert "position_ids: got shape [4]" in str(error), error


@check
def vllm_ascend_s_operator_is_made_of_ours():
    held = importlib.import_module("vllm_ascend.ops.register_custom_ops").rope_forward_oot
    assert held.__module__ == "npu_ops_adapters.serving" and held.__wrapped__.__module__ == HOME
    schema = str(torch.ops.vllm.npu_rotary_embedding.default._schema)
    assert "Tensor cos_sin_cache, SymInt head_size" in schema, schema


@check
def rope_of_images():
    for head, width, section, interleaved, neox in FORMS:
        made = embedding(OURS, head, width, section, interleaved, neox)
        own = embedding(THEIRS, head, width, section, interleaved, neox)
        q, k = rows(TOKENS, 4 * head, dtype=torch.float32), rows(TOKENS, head, dtype=torch.float32)
        for positions, op in zip(steps(), ("rope", "mrope"), strict=True):
            with Calls() as counted:
                found = made.forward_oot(positions, q, k)
            assert counted.found == [op], counted.found
            for one, other in zip(found, own.forward_native(positions, q, k), strict=True):
                close(one, other, 1e-5)


@check
def rope_of_a_tower():
    common = importlib.import_module(f"{LAYERS}.rotary_embedding.common")
    cos, sin = embedding(THEIRS, 64, 64).cos_sin_cache[:TOKENS].chunk(2, -1)
    for neox, batch in ((True, (2,)), (True, ()), (False, (2,))):
        made = bare(f"{HOME}.AscendApplyRotaryEmb", is_neox_style=neox)
        x = rows(*batch, TOKENS, 3, 64, dtype=torch.float32)
        with Calls() as counted:
            found = made.forward_oot(x, cos, sin)
        assert counted.found == ["rope"]
        close(found, common.ApplyRotaryEmb.forward_static(x, cos, sin, neox), 1e-5)


def tower():
    model = importlib.import_module("vllm.model_executor.models.qwen3_vl")
    rotary = types.SimpleNamespace(
        base=10000.0, rotary_dim=32,
        get_cos_sin=bare(THEIRS, cos_sin_cache=cos_sin_of(10000.0, 32)).get_cos_sin,
    )  # fmt: skip
    return bare(
        f"{model.__name__}.Qwen3_VisionTransformer", spatial_merge_size=2, rotary_pos_emb=rotary,
        num_grid_per_side=8, pos_embed=torch.nn.Embedding(64, 16),
        patch_embed=types.SimpleNamespace(proj=types.SimpleNamespace(weight=torch.ones(1))),
    )  # fmt: skip


def cos_sin_of(base, width):
    angles = torch.arange(POSITIONS)[:, None] / base ** (torch.arange(0, width, 2) / width)
    return torch.cat((angles.cos(), angles.sin()), 1)


@check
def places_in_a_tower():
    """A tower's table and position embedding, for a grid as wide as the table, and
    for two grids."""
    ours = importlib.import_module("npu_ops_adapters.vision_tower").angles
    made = tower()
    for grids in ([[1, 8, 8]], [[1, 4, 6], [2, 6, 14]]):
        for one, other in zip(ours(made, grids), made.rot_pos_emb(grids), strict=True):
            close(one, other, 1e-5)
        replaced = type(made).fast_pos_embed_interpolate
        assert replaced.__module__ == "npu_ops_adapters.serving", replaced
        theirs = replaced.__wrapped__(made, grids)
        close(made.fast_pos_embed_interpolate(grids), theirs, 1e-5)


@check
def attention_of_a_tower():
    ours = importlib.import_module("npu_ops_adapters.vllm.vision_attention").ours
    made = types.SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=24, scale=24**-0.5)
    q, k, v = (rows(1, TOKENS, n, 24, seed=n, dtype=torch.float32) for n in (4, 2, 2))
    found = ours(made, q, k, v, torch.tensor([0, 5, TOKENS]))
    for image in (slice(0, 5), slice(5, TOKENS)):
        heads = (x[:, image].transpose(1, 2) for x in (q, k, v))
        right = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        close(found[:, image], right.transpose(1, 2), 1e-5)
    two = [x.view(3, 3, -1) for x in (q, k, v)]  # without lengths each batch entry is an image
    right = ours(made, q, k, v, torch.tensor([0, 3, 6, 9]))
    close(ours(made, *two), right.view(3, 3, -1), 0)


@check
def features_are_added_to_the_sum():
    with_sums = importlib.import_module("npu_ops_adapters.vllm.deepstack").with_sums

    class Model:
        def __init__(self, ends):
            layers = [types.SimpleNamespace(forward=lambda x, y: (x, y)) for _ in range(3)]
            text = types.SimpleNamespace(layers=layers, start_layer=0, end_layer=ends)
            self.language_model = types.SimpleNamespace(model=text)
            self.deepstack_num_level = 2

    Model.__init__ = with_sums(Model.__init__)
    layers = Model(3).language_model.model.layers
    assert [layer.forward(3, 4) for layer in layers] == [(7, None), (7, None), (3, 4)]
    try:
        Model(2)
    except RuntimeError as error:
        assert "needs more than the 2 to which deepstack adds" in str(error), error
    else:
        raise AssertionError("nothing was raised")


def attention(norm, rotary, head, gated):
    """Return a layer that passes its input on as the projection, and the arguments of attention."""
    weights = (rows(head, seed=seed, dtype=torch.float32) / 8 + 1 - int(gated) for seed in (5, 6))
    q_norm, k_norm = (
        bare(
            f"{LAYERS}.layernorm.{norm}", weight=weight, variance_epsilon=1e-6, hidden_size=head,
            has_weight=True, pass_weight=True, variance_size_override=None,
        )
        for weight in weights
    )  # fmt: skip
    for made in (q_norm, k_norm):
        made._forward_method = made.forward_native
    seen = []

    def attend(*qkv):
        seen.append([x.clone() for x in qkv])
        return qkv[0] * 2

    made = types.SimpleNamespace(
        qkv_proj=lambda x: (x, None), o_proj=lambda x: (x + 1, None), attn=attend, num_heads=4,
        num_kv_heads=2, head_dim=head, q_size=4 * head, kv_size=2 * head, rotary_emb=rotary,
        q_norm=q_norm, k_norm=k_norm, config=types.SimpleNamespace(model_type="qwen3_next"),
    )  # fmt: skip
    if gated:
        made.attn_output_gate = True
    return made, seen


MODELS = (
    (f"{WORKER}.patch_qwen3vl.Qwen3Attention", "RMSNorm", False),
    (f"{WORKER}.patch_qwen3vl.Qwen3MoeAttention", "RMSNorm", False),
    (f"{WORKER}.patch_qwen3_5.Qwen3NextAttention", "GemmaRMSNorm", True),
)


@check
def attention_up_to_its_rotation_is_one_launch():
    for dotted, norm, gated in MODELS:
        ours = pkgutil.resolve_name(dotted).forward
        for head, width, section, interleaved, neox in FORMS:
            form = (head, width, section, interleaved, neox)
            x = rows(TOKENS, (8 + 4 * gated) * head, dtype=torch.float32)
            for positions in steps():
                # not the class that the method expects
                own = embedding(THEIRS, *form).forward_native
                for function, rotary, wanted in (
                    (ours, embedding(OURS, *form), ["qk_norm_rope"]), (ours.__wrapped__, own, [])
                ):  # fmt: skip
                    made, seen = attention(norm, rotary, head, gated)
                    out = torch.full((TOKENS, 4 * head), torch.nan)
                    with torch.no_grad(), Calls() as counted:
                        if gated:
                            function(made, positions=positions, output=out, hidden_states=x)
                        else:
                            out = function(made, positions=positions, hidden_states=x)
                    assert counted.found == wanted, (dotted, counted.found)
                    if wanted:
                        mine = out, *seen[0]
                for one, other in zip(mine, (out, *seen[0]), strict=True):
                    close(one, other, 2e-5)


@check
def it_is_traced():
    """vLLM compiles models with Dynamo, which would raise on a graph break."""
    ours = pkgutil.resolve_name(MODELS[0][0]).forward
    made, _ = attention("RMSNorm", embedding(OURS, 128, 128, [24, 20, 20]), 128, False)
    made.attn = lambda q, k, v: q + k.repeat(1, 2)
    x, positions = rows(TOKENS, 8 * 128, dtype=torch.float32), steps()[1]
    compiled = torch.compile(lambda p, x: ours(made, p, x), fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(positions, x), ours(made, positions, x), 1e-6)


@check
def qwen3_without_images_is_vllm_ascend_s():
    """Its graph fuses the call by a pattern, which ours would hide."""
    ours = pkgutil.resolve_name(MODELS[0][0]).forward
    rotary = embedding(PLAIN, 64, 64)
    rotary._forward_method = lambda positions, q, k: (q, k)
    made, seen = attention("RMSNorm", rotary, 64, False)
    with torch.no_grad(), Calls() as counted:
        ours(made, steps()[0], rows(TOKENS, 8 * 64, dtype=torch.float32))
    assert counted.found == [] and len(seen) == 1
