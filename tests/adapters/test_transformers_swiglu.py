"""Test which SwiGLU calls of transformers' models npu-ops computes, and which transformers does.

test_transformers.py tests whole models.
"""

import types

import pytest
import torch
from npu_ops_tools.demo_model import Counter
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import npu_ops
from npu_ops.core import env

CONFIG = Qwen3Config(hidden_size=16, intermediate_size=24)


@pytest.fixture
def mlp(applied):
    return Qwen3MLP(CONFIG).bfloat16()


def x(dtype=torch.bfloat16):
    return torch.randn(3, 16).to(dtype)


def result(module, given):
    """Return a module's output, and its number of swiglu calls."""
    with Counter() as counter:
        out = module(given)
    return out, counter.calls.get("npu_ops.swiglu.default", 0)


def theirs(module, given):
    return module.down_proj(module.act_fn(module.gate_proj(given)) * module.up_proj(given))


def test_it_is_ours(mlp):
    given = x()
    out, calls = result(mlp, given)
    opened = npu_ops.swiglu(mlp.gate_proj(given), mlp.up_proj(given))
    assert calls == 1 and torch.equal(out, mlp.down_proj(opened))


@pytest.mark.parametrize("consistent", ["tokens", "chunks"])
def test_consistent_mode_has_the_bits_of_transformers(mlp, consistent):
    """transformers rounds silu(gate), as a server and torch_npu's operator do in this mode."""
    given = x()
    with env.override(consistent=consistent):
        out, calls = result(mlp, given)
        assert calls == 0 and torch.equal(out, theirs(mlp, given))


def watched(module):
    module.act_fn.register_forward_hook(lambda *given: None)


def of_gelu(module):
    module.act_fn = ACT2FN["gelu"]


def in_double(module):
    module.double()


def projections_that_differ(module):
    module.up_proj.register_forward_hook(lambda module, given, out: out.float())
    module.down_proj.float()


def spread(module):
    class Spread(torch.Tensor):
        """Stands for a tensor distributed over ranks."""

    for name in ("gate_proj", "up_proj"):
        hook = lambda module, given, out: out.as_subclass(Spread)  # noqa: E731
        getattr(module, name).register_forward_hook(hook)


@pytest.mark.parametrize(
    "change", [watched, of_gelu, in_double, projections_that_differ, spread],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_other_calls_are_transformers(mlp, change):
    change(mlp)
    given = x(torch.float64 if change is in_double else torch.bfloat16)
    out, calls = result(mlp, given)
    assert calls == 0 and torch.equal(out, theirs(mlp, given))


def test_it_compiles(mlp):
    given = x()
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given), mlp(given))
    torch._dynamo.reset()


def test_gradients_are_transformers(mlp):
    mlp.float()
    given = x(torch.float32)
    wrt = list(mlp.parameters())
    actual = torch.autograd.grad(mlp(given).square().sum(), wrt)
    expected = torch.autograd.grad(theirs(mlp, given).square().sum(), wrt)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("consistent", ["", "tokens"])
def test_experts(applied, consistent):
    """Experts have gate and up in one tensor."""
    experts, both = types.SimpleNamespace(act_fn=ACT2FN["silu"]), torch.randn(5, 48).bfloat16()
    with env.override(consistent=consistent), Counter() as counter:
        out = Qwen3MoeExperts._apply_gate(experts, both)
    assert len(counter.calls) == (not consistent)
    expected = moe._default_apply_gate(experts, both) if consistent else npu_ops.swiglu(both)
    assert torch.equal(out, expected)


def test_the_gate_that_classes_are_made_with_stays(applied):
    assert not hasattr(moe._default_apply_gate, "__wrapped__")


def test_experts_of_another_activation_are_transformers(applied):
    experts, both = types.SimpleNamespace(act_fn=ACT2FN["gelu"]), torch.randn(5, 48)
    with Counter() as counter:
        out = Qwen3MoeExperts._apply_gate(experts, both)
    assert not counter.calls and torch.equal(out, moe._default_apply_gate(experts, both))
