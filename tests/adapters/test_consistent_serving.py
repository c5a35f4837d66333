"""With NPU_OPS_CONSISTENT, functions that adapters replace compute as transformers does.

The functions are SGLang's, vLLM's, Megatron's and MindSpeed's. test_sglang.py tests a whole server.
"""

import json
import subprocess
import sys
import types

import fetch_frameworks
import npu_ops_adapters
import pytest
import torch
from npu_ops_adapters import vision_tower
from npu_ops_adapters.megatron import experts as megatron_experts
from npu_ops_adapters.mindspeed import experts as mindspeed_experts
from npu_ops_adapters.sglang import experts as sglang_experts
from npu_ops_adapters.sglang import roundings
from npu_ops_adapters.sglang.experts import experts
from npu_ops_adapters.transformers.vision_position import interpolation
from npu_ops_adapters.vllm import experts as vllm_experts
from processes import HERE, environment
from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
from transformers.models.qwen3_vl import Qwen3VLConfig, modeling_qwen3_vl

from npu_ops.core import env

EXPERTS, CHOSEN, HIDDEN, WIDE = 6, 3, 40, 24
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def drawn(dtype, tokens=70):
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    gate_up = (torch.randn(EXPERTS, 2 * WIDE, HIDDEN) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(EXPERTS, HIDDEN, WIDE) / WIDE**0.5).to(dtype)
    weights, index = torch.randn(tokens, EXPERTS).softmax(-1).topk(CHOSEN)
    return x, gate_up, down, index, weights


def right(x, gate_up, down, index, weights):
    """Compute one token and one expert at a time, in fp64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(index.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if expert < EXPERTS:
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                opened = torch.nn.functional.silu(gate) * up
                out[token] += share * (down[expert].double() @ opened)
    return out


@BOTH
def test_experts_are_the_formula_and_a_token_depends_on_itself_alone(dtype):
    given = drawn(dtype)
    given[3][5, 1] = EXPERTS  # another rank's expert
    found = experts(*given)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), right(*given), rtol=tolerance, atol=tolerance)
    x, gate_up, down, index, weights = given
    for row in (0, 5, 69):
        one = slice(row, row + 1)
        alone = experts(x[one], gate_up, down, index[one], weights[one])
        assert torch.equal(alone, found[one])


@BOTH
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_all_of_transformers_ways_are_these(dtype, implementation):
    x, gate_up, down, index, weights = drawn(dtype)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDE, num_experts=EXPERTS,
        experts_implementation=implementation,
    )  # fmt: skip
    module = modeling_qwen3_moe.Qwen3MoeExperts(config).to(dtype)
    module.gate_up_proj.data.copy_(gate_up)
    module.down_proj.data.copy_(down)
    with env.override(consistent="tokens"), torch.no_grad():
        npu_ops_adapters.apply()
        try:
            found = module(x, index, weights.to(dtype))
        finally:
            npu_ops_adapters.revert()
    assert torch.equal(found, experts(x, gate_up, down, index, weights))


@pytest.mark.parametrize("renormalise", [True, False])
def test_vllm_ascend_chooses_as_transformers_does(renormalise):
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        norm_topk_prob=renormalise,
    )  # fmt: skip
    router = modeling_qwen3_moe.Qwen3MoeTopKRouter(config).bfloat16()
    torch.nn.init.normal_(router.weight)
    x = torch.randn(70, HIDDEN).bfloat16()
    logits, expected, named = router(x)
    weights, index = vllm_experts.ours(x, logits, CHOSEN, False, renormalise, None, None, None)
    assert index.dtype is torch.int32 and torch.equal(index.long(), named)
    assert torch.equal(weights.to(torch.bfloat16), expected)


def test_another_choice_of_vllm_ascends_is_refused():
    given = None, torch.randn(7, EXPERTS), CHOSEN
    with pytest.raises(ValueError, match="use_grouped_topk: got bool"):
        vllm_experts.ours(*given, True, True, None, None, None)
    with pytest.raises(ValueError, match="scoring_func and routed_scaling_factor: got 'sigmoid'"):
        vllm_experts.ours(*given, False, True, None, None, None, scoring_func="sigmoid")


def permuted():
    """Return rows of 70 tokens, three per token, sorted by expert, and each row's token."""
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(70)])
    chosen = torch.zeros(70, EXPERTS, dtype=torch.bool).scatter(1, index, True)
    tokens = torch.arange(70).expand(EXPERTS, -1).masked_select(chosen.t())
    return torch.randn(len(tokens), HIDDEN, requires_grad=True), tokens


def test_megatrons_sum_is_the_sum_with_its_gradient():
    rows, tokens = permuted()
    found = megatron_experts._add(None)(rows, tokens, (70, HIDDEN))
    expected = torch.zeros(70, HIDDEN).index_add(0, tokens, rows)
    torch.testing.assert_close(found, expected)
    (own,) = torch.autograd.grad(found.square().sum(), rows)
    (right,) = torch.autograd.grad(expected.square().sum(), rows)
    torch.testing.assert_close(own, right)
    none = megatron_experts._add(None)(rows[:0], tokens[:0], (0, HIDDEN))
    assert none.shape == (0, HIDDEN)


def test_tokens_that_lack_an_expert_are_nan():
    rows, tokens = permuted()
    moved = torch.where(tokens == 3, 4, tokens)
    assert megatron_experts._add(None)(rows, moved, (70, HIDDEN)).isnan().all()


@pytest.mark.parametrize(
    "more, says",
    [
        ({}, "got 210 rows for 69 tokens"),
        ({"probs": torch.ones(70, EXPERTS)}, "probs: got a value, needs None"),
        ({"fused": True}, "fused: got a value, needs None"),
        ({"drop_and_pad": True}, "drop_and_pad: got a value, needs None"),
    ],
)
def test_another_sum_of_megatrons_is_refused(more, says):
    rows, tokens = permuted()
    with pytest.raises(ValueError, match=says):
        megatron_experts._add(None)(rows, tokens, (70 if more else 69, HIDDEN), **more)


def test_mindspeeds_experts_are_these():
    """Megatron's grouped experts call MindSpeed's grouped product, which the adapter replaces."""
    x, gate_up, down, index, weights = drawn(torch.bfloat16)
    by_expert, order = index.reshape(-1).sort(stable=True)
    counts = torch.bincount(by_expert, minlength=EXPERTS)

    def forward(self, rows, counts, shares):
        gate, up = mindspeed_experts.gmm(rows, gate_up.transpose(1, 2), counts).chunk(2, -1)
        opened = (torch.nn.functional.silu(gate) * up * shares[:, None]).to(x.dtype)
        return mindspeed_experts.gmm(opened, down.transpose(1, 2), counts), None

    layer, shares = megatron_experts.computed(forward), weights.reshape(-1)[order]
    rows, _ = layer(None, x[order // CHOSEN], counts, shares)
    found = megatron_experts._add(None)(rows, order // CHOSEN, x.shape)
    assert torch.equal(found, experts(x, gate_up, down, index, weights))
    with pytest.raises(ValueError, match="gemm_fusion: got True, needs False"):
        mindspeed_experts.gmm(x, gate_up, counts, gemm_fusion=True)


def of_sglang(gate_up, down, **changes):
    layer = types.SimpleNamespace(w13_weight=gate_up, w2_weight=down)
    settings = {
        "activation": "silu", "apply_router_weight_on_input": False, "gemm1_alpha": None,
    }  # fmt: skip
    return layer, types.SimpleNamespace(**settings | changes)


def test_sglangs_experts_are_these():
    x, gate_up, down, index, weights = drawn(torch.bfloat16)
    layer, config = of_sglang(gate_up, down)
    found = sglang_experts.ours(layer, x, (weights, index.int(), None), config)
    assert torch.equal(found, experts(x, gate_up, down, index, weights))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"activation": "gelu"}, "activation: got 'gelu', needs 'silu'"),
        ({"gemm1_alpha": 1.7}, "gemm1_alpha: got float, needs None"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input: got bool"),
    ],
)
def test_other_experts_are_refused(changes, says):
    x, gate_up, down, index, weights = drawn(torch.float32)
    layer, config = of_sglang(gate_up, down, **changes)
    with pytest.raises(ValueError, match=says):
        sglang_experts.ours(layer, x, (weights, index, None), config)


def test_the_expert_of_all_tokens_is_added_in_training_s_roundings():
    x, shared, final = (torch.randn(9, HIDDEN).bfloat16() for _ in range(3))
    gate = torch.randn(1, HIDDEN).bfloat16()
    opened = torch.sigmoid(torch.nn.functional.linear(x, gate)) * shared
    expected = final + opened
    sglang_experts.add_shared(x, gate[0], shared, final)
    assert torch.equal(final, expected)


def test_a_vision_towers_table_is_transformers():
    config = Qwen3VLConfig(vision_config={"hidden_size": 64, "num_heads": 4, "depth": 1})
    tower = modeling_qwen3_vl.Qwen3VLVisionModel(config.vision_config)
    grids, merge = [[1, 4, 6], [2, 2, 4]], config.vision_config.spatial_merge_size
    of_server = types.SimpleNamespace(
        rotary_pos_emb=types.SimpleNamespace(rotary_dim=8, base=10000.0),
        spatial_merge_size=merge, device="cpu", rot_pos_ids=places,
    )  # fmt: skip
    cos, sin = vision_tower.angles(of_server, grids)
    assert cos.dtype == sin.dtype == torch.float32
    expected = position_embeddings(tower, grids)
    assert torch.equal(cos, expected[0][:, :8]) and torch.equal(sin, expected[1][:, :8])


@pytest.mark.parametrize("version", [None, "4.57.6", "5.10.4"])
def test_a_vision_towers_positions_are_trainings(version):
    """Without NPU_OPS_CONSISTENT 1234, 236881 and 1308 elements differ in the three versions."""
    folders = [fetch_frameworks.tree(f"transformers-{version}")] if version else []
    done = subprocess.run(
        [sys.executable, HERE / "consistent_tower.py"], capture_output=True, text=True,
        env=environment(HERE, *folders, NPU_OPS_CONSISTENT="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 508416]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"mode": "bicubic"}, "mode: got 'bicubic'"),
        ({"align_corners": False}, "align_corners: got False"),
        ({"padding": "zeros"}, "padding: got 'zeros'"),
        ({"kwargs": {"interp_indices": 1}}, "interp_indices: got a value from the caller"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_another_interpolation_is_transformers(changes, says):
    with pytest.raises(ValueError, match=says):
        interpolation(torch.tensor([[1, 2, 2]]), 8, **{"align_corners": True} | changes)


def places(height, width, merge):
    """Return each patch's row and column, block by block, as SGLang's `rot_pos_ids` does."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    blocks = (height // merge, merge, width // merge, merge)
    return torch.stack([x.reshape(blocks).transpose(1, 2).flatten() for x in (row, column)], -1)


def position_embeddings(tower, grids):
    """Return the position embeddings that the tower passes to its blocks."""
    seen = []
    hook = tower.blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.zeros(patches, tower.patch_embed.proj.weight[0].numel())
    with torch.no_grad():
        tower(pixels, grid_thw=torch.tensor(grids))
    hook.remove()
    return seen[0]


def test_a_layer_that_is_built_has_trainings_order():
    class Layer:
        def __init__(self, config, quant_config=None, prefix=""):
            self.use_hf_deepstack_order = config

    made = roundings.with_the_order_of_training(Layer.__init__)
    layer = Layer.__new__(Layer)
    made(layer, config=False)
    assert layer.use_hf_deepstack_order is True
