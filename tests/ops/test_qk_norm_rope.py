"""qk_norm_rope against transformers' layers and the reference: tables, caches, views, gradients."""

import dataclasses

import pytest
import support
import torch
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.qk_norm_rope import op
from npu_ops.ops.qk_norm_rope.cases import CASES, DIFFERENTIABLE, TOLERANCES, Case

OPS = ("qk_norm_rope", "qk_norm_rope_backward")
IMPLEMENTATIONS = support.every_implementation(op.forward)
PLAIN = Case("plain", 5, 4, 2, 32, 32, batch=2)
GATED = Case(
    "gated", 5, 4, 2, 32, 8, section=(2, 1, 1), gated=True, zero_centered=True, batch=2
)  # fmt: skip
SECTIONS = dataclasses.replace(PLAIN, section=(6, 5, 5))


def call(inputs):
    cached = "positions" in inputs
    return (npu_ops.qk_norm_rope_cached if cached else npu_ops.qk_norm_rope)(**inputs)


def run(implementation, inputs, wrt=DIFFERENTIABLE):
    with support.forced(implementation, *OPS):
        return support.evaluate(lambda **named: call(named), inputs, wrt)


# Results, compared with the reference


def norm_of(module, weight):
    return lambda x: torch.func.functional_call(module, {"weight": weight}, (x,))


def of_transformers(case, norm, rotate, merge=None):
    """Return what a transformers layer computes between its projections and its attention."""

    def function(qkv, q_weight, k_weight, cos, sin, **_):
        dim = case.head_dim
        queries = case.num_heads * (2 if case.gated else 1) * dim
        keys = case.num_kv_heads * dim
        q, k, v = qkv.split([queries, keys, keys], dim=-1)
        shape, gate = (*qkv.shape[:-1], -1, dim), None
        if case.gated:
            q, gate = q.view(*qkv.shape[:-1], -1, 2 * dim).chunk(2, dim=-1)
        q = norm_of(norm, q_weight)(q.reshape(shape)).transpose(1, 2)
        k = norm_of(norm, k_weight)(k.reshape(shape)).transpose(1, 2)
        if merge:
            cos, sin = merge(cos), merge(sin)
        q, k = rotate(q, k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.view(shape), gate

    return function


def merged(section):
    """Return Qwen3-VL's merge of the three axes, for tables instead of angles."""

    def merge(table):
        half = table.shape[-1] // 2
        out = table[0].clone()
        for axis in (1, 2):
            for start in (0, half):
                columns = slice(start + axis, start + 3 * section[axis], 3)
                out[..., columns] = table[axis][..., columns]
        return out

    return merge


LAYERS = {
    "qwen3": (PLAIN, qwen3.Qwen3RMSNorm(32), qwen3.apply_rotary_pos_emb, None),
    "qwen3-vl": (SECTIONS, qwen3_vl.Qwen3VLTextRMSNorm(32), qwen3_vl.apply_rotary_pos_emb,
                 merged(SECTIONS.section)),
    "qwen3.5": (GATED, qwen3_5.Qwen3_5RMSNorm(32), qwen3_5.apply_rotary_pos_emb,
                merged(GATED.section)),
}  # fmt: skip


@IMPLEMENTATIONS
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_transformers(layer, implementation, device):
    """Compare outputs and gradients."""
    case, *parts = LAYERS[layer]
    inputs = case.inputs(torch.float32)
    expected = support.evaluate(of_transformers(case, *parts), inputs, DIFFERENTIABLE)
    support.assert_all_close(
        run(implementation, support.on_device(inputs, device)), expected, support.twice(TOLERANCES)
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_transformers_in_bfloat16(layer):
    """transformers rounds up to four times; our result is one rounding away from fp64."""
    case, *parts = LAYERS[layer]
    inputs = case.inputs(torch.bfloat16)
    inputs |= {name: inputs[name].bfloat16() for name in ("cos", "sin")}
    theirs = of_transformers(case, *parts)(**inputs)
    exact = call(support.floats(inputs, torch.float64))
    one = TOLERANCES[torch.bfloat16]
    for x, y, z in zip(call(inputs), theirs, exact, strict=True):
        if x is not None:
            assert_close("output", x, z, one)
            assert_close("output", x, y, Tolerance(4 * one.ratio, 4 * one.max_abs))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", support.DTYPES, ids=support.named)
@pytest.mark.parametrize("section", [None, (6, 5, 5)], ids=["one axis", "three"])
def test_a_cache_is_tables(section, dtype, implementation, device):
    """A cache equals tables gathered at the positions, also if all axes share one position."""
    case = dataclasses.replace(PLAIN, section=section, cached=True)
    inputs = support.on_device(case.inputs(dtype), device)
    cache, positions = inputs["cos_sin_cache"], inputs["positions"]
    tables = {n: x for n, x in inputs.items() if n not in ("cos_sin_cache", "positions")}
    for rows in (positions, positions[0]) if section else (positions,):
        cos, sin = cache[rows].chunk(2, dim=-1)
        if section and rows.dim() == 2:
            cos, sin = (table.expand(3, *table.shape) for table in (cos, sin))
        expected = run(implementation, tables | {"cos": cos, "sin": sin})
        actual = run(implementation, inputs | {"positions": rows})
        support.assert_same_bits(actual, expected)


@IMPLEMENTATIONS
def test_equal_rows_of_three_axes_are_one(implementation, device):
    inputs = support.on_device(PLAIN.inputs(torch.float32), device)
    tables = {name: inputs[name].expand(3, *inputs[name].shape) for name in ("cos", "sin")}
    settings = {"mrope_section": [6, 5, 5], "section_layout": "interleaved"}
    expected = run(implementation, inputs)
    actual = run(implementation, inputs | tables | settings)
    support.assert_same_bits(actual, expected)


@IMPLEMENTATIONS
def test_a_table_of_one_batch_is_for_all(implementation, device):
    inputs = support.on_device(PLAIN.inputs(torch.float32), device)
    one = {name: inputs[name][:1] for name in ("cos", "sin")}
    each = {name: table.expand(2, -1, -1) for name, table in one.items()}
    expected = run(implementation, inputs | each)
    support.assert_same_bits(run(implementation, inputs | one), expected)


@IMPLEMENTATIONS
def test_packed_tokens_are_a_batch_of_one(implementation, device):
    inputs = support.on_device(dataclasses.replace(PLAIN, batch=1).inputs(torch.float32), device)
    packed = inputs | {name: inputs[name][0] for name in ("qkv", "cos", "sin")}
    expected = run(implementation, inputs)
    for name, value in run(implementation, packed).items():
        assert torch.equal(value, expected[name].view(value.shape))


@IMPLEMENTATIONS
def test_rotation_keeps_norms(implementation, device):
    """With weights of 1 each head has norm sqrt(D), before and after any rotation."""
    inputs = support.on_device(PLAIN.inputs(torch.float32), device)
    inputs |= {name: torch.ones_like(inputs[name]) for name in ("q_weight", "k_weight")}
    with support.forced(implementation, *OPS):
        q, k, *_ = call(inputs | {"eps": 0.0})
    for x in (q, k):
        torch.testing.assert_close(x.norm(dim=-1), torch.full_like(x[..., 0], 32**0.5))


@IMPLEMENTATIONS
def test_sums_are_the_same_each_time(implementation, device):
    case = next(case for case in CASES if case.name == "qwen3.5-9b-t64")
    inputs = support.on_device(case.inputs(torch.float32), device)
    first, second = (run(implementation, inputs) for _ in range(2))
    support.assert_same_bits(first, second)


# Memory


@pytest.mark.parametrize("case", [PLAIN, GATED], ids=["plain", "gated"])
def test_views_are_the_copies(case):
    inputs = case.inputs(torch.float32)
    expected = run("cpu", inputs)
    actual = run("cpu", inputs | {"copy_rest": False})
    support.assert_same_bits(actual, expected)
    _, _, *rest = call(inputs | {"copy_rest": False})
    memory = inputs["qkv"].untyped_storage().data_ptr()
    assert all(x is None or x.untyped_storage().data_ptr() == memory for x in rest)


def gradient(implementation, device, loss):
    """Return the gradient of qkv for a loss of the gated case's outputs."""
    inputs = support.on_device(GATED.inputs(torch.float32), device)
    qkv = inputs["qkv"].detach().requires_grad_()
    with support.forced(implementation, *OPS):
        (grad,) = torch.autograd.grad(loss(call(inputs | {"qkv": qkv})), qkv)
    return grad.cpu()


@IMPLEMENTATIONS
@pytest.mark.parametrize("used", ["q", "k", "v", "gate"])
def test_outputs_that_nobody_uses(used, implementation, device):
    """An output that the loss does not use contributes a zero gradient."""

    def loss(outputs):
        return outputs[("q", "k", "v", "gate").index(used)].square().sum()

    expected = gradient("reference", "cpu", loss)
    actual = gradient(implementation, device, loss)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
def test_heads_with_one_gradient(implementation, device):
    """The gradient of a sum over heads is one row, expanded with stride 0."""

    def loss(outputs):
        return sum(x.sum(-2).square().sum() for x in outputs)

    expected = gradient("reference", "cpu", loss)
    actual = gradient(implementation, device, loss)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# Calls that are rejected


def test_a_wide_head_is_not_for_an_npu():
    """The CPU kernel takes heads of 640; Triton and AscendC decline them with a reason."""
    inputs = Case("wide", 2, 1, 1, 640, 640).inputs(torch.float32)
    expected = run("reference", support.floats(inputs, torch.float64))
    support.assert_all_close(run("cpu", inputs), expected, TOLERANCES)
    arguments = op.forward.Arguments(*[None] * 19)._replace(q_weight=torch.ones(640))
    assert "heads of 640 elements" in op._why_not_triton(arguments)
    for wide, said in ((128, "heads of 640 elements"), (258, "258 rotated elements")):
        assert said in op._why_not_ascendc(arguments._replace(rotary_dim=wide))


def test_a_consistent_compiled_call_takes_any_number_of_tokens():
    """vLLM marks the number of tokens as dynamic, so specialising on it would be an error."""
    weight, table = torch.rand(16), torch.randn(64, 16)
    positions, qkv = torch.randint(0, 64, (3, 10)), torch.randn(10, 8 * 16)

    def rotated(positions, qkv):
        return npu_ops.qk_norm_rope_cached(
            positions, qkv, weight, weight, table, num_heads=4, num_kv_heads=2,
            mrope_section=(4, 2, 2), section_layout="interleaved",
        )[:3]  # fmt: skip

    torch._dynamo.mark_dynamic(positions, 1)
    torch._dynamo.mark_dynamic(qkv, 0)
    with env.override(consistent="tokens"), torch.no_grad():
        compiled = torch.compile(rotated, backend="aot_eager", fullgraph=True)
        found, right = compiled(positions, qkv), rotated(positions, qkv)
    assert all(x.equal(y) for x, y in zip(found, right, strict=True))
