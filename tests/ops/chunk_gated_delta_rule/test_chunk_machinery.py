"""The chunked gated delta rule as a torch operator, in models, and wrong calls of it."""

import functools
import inspect
import re

import pytest
import torch
from chunk_calls import BY_TOKEN, OP, delta_rule, qkv, run
from support import (
    assert_checkpointing_changes_nothing,
    assert_compiled_is_eager,
    assert_fake_is_like_real,
    assert_same_steps,
    evaluate,
    floats,
    train_step,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.chunk_gated_delta_rule.cases import CASES, DIFFERENTIABLE

# As a torch operator


def operator_inputs(packed):
    """What the operator takes, of six tokens."""
    inputs = floats(qkv(1, 6), torch.float64)
    leaves = [inputs[n].requires_grad_() for n in BY_TOKEN]
    state = inputs["initial_state"].repeat(2 if packed else 1, 1, 1, 1).requires_grad_()
    return [*leaves, state, torch.tensor([0, 2, 6]) if packed else None, 0.5, 16, False, packed]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_opcheck(packed, wanted):
    inputs = [*operator_inputs(packed), wanted]
    torch.library.opcheck(torch.ops.npu_ops.chunk_gated_delta_rule.default, inputs)


def test_opcheck_backward():
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_inputs(True)]
    o, final = torch.ops.npu_ops.chunk_gated_delta_rule(*inputs, True)
    torch.library.opcheck(
        torch.ops.npu_ops.chunk_gated_delta_rule_backward.default, [o, final, *inputs]
    )


def case_named(name):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", ["packed", "no-state"])
def test_gradcheck(name):
    inputs = floats(case_named(name).inputs(torch.float64), torch.float64)
    inputs |= {n: inputs[n][:, :6] for n in BY_TOKEN}
    if inputs["cu_seqlens"] is not None:
        inputs["cu_seqlens"] = inputs["cu_seqlens"].clamp(max=6)
    names = [n for n in DIFFERENTIABLE if inputs[n] is not None]

    def function(*leaves):
        results = delta_rule(**inputs | dict(zip(names, leaves, strict=True)))
        return tuple(r for r in results if r is not None)

    leaves = [inputs[n].detach().clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_there_is_no_second_derivative():
    inputs = qkv()
    q = inputs.pop("q").requires_grad_()
    o, _ = delta_rule(q, **inputs)
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule_backward"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["packed", "no-state"])
def test_compile(name):
    """One graph, forward and backward equal to eager."""
    inputs = case_named(name).inputs(torch.float32)
    names = [n for n in DIFFERENTIABLE if inputs[n] is not None]

    def function(*leaves):
        o, final = delta_rule(**inputs | dict(zip(names, leaves, strict=True)))
        return o.square().sum() + (0 if final is None else final.cos().sum())

    assert_compiled_is_eager(function, [inputs[n] for n in names], "aot_eager")


@pytest.mark.parametrize("name", ["packed", "no-state", "empty"])
def test_fake_is_like_real(name):
    inputs = case_named(name).inputs(torch.bfloat16)
    wrt = tuple(n for n in DIFFERENTIABLE if inputs[n] is not None)
    names = [name for name, x in inputs.items() if isinstance(x, torch.Tensor)]

    def function(*tensors):
        given = inputs | dict(zip(names, tensors, strict=True))
        return evaluate(delta_rule, given, wrt).values()

    assert_fake_is_like_real(function, *(inputs[name] for name in names))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    inputs = qkv()
    q = inputs.pop("q")

    def layer(x):
        return delta_rule(x.sin(), **inputs)[0].square()

    assert_checkpointing_changes_nothing(layer, [q], use_reentrant)


def test_autocast():
    """The products inside are not autocast's."""
    inputs = qkv()
    expected = run("cpu", inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run("cpu", inputs)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("normalized", [True, False])
def test_only_the_inputs_are_kept(normalized):
    inputs = qkv(1, 200) | {"use_qk_l2norm_in_kernel": normalized}
    leaves = {name: inputs[name].requires_grad_() for name in (*BY_TOKEN, "initial_state")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        delta_rule(**inputs)
    own = {x.data_ptr() for x in leaves.values()}
    assert kept and {x.data_ptr() for x in kept} <= own


def test_explain():
    rows = npu_ops.explain(delta_rule, **qkv())
    assert [row.implementation for row in rows if row.why_not is None] == ["cpu"]
    wide = npu_ops.explain(delta_rule, **floats(qkv(), torch.float64))
    assert [row.implementation for row in wide if row.why_not is None] == ["reference"]
    assert "it has no float64 kernel" in {row.why_not for row in wide}


# Models


SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}  # fmt: skip


def small_model(module):
    torch.manual_seed(0)
    if module is qwen3_5:
        return module.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**SMALL))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = qwen3_next.Qwen3NextConfig(
        **SMALL, **experts, shared_expert_intermediate_size=16, decoder_sparse_step=1
    )
    return module.Qwen3NextForCausalLM(config)


def known_only(function, calls):
    """As transformers calls a kernel: with those keywords of the model that it knows."""
    known = inspect.signature(function).parameters

    def call(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **{n: x for n, x in kwargs.items() if n in known})

    return call


@pytest.mark.parametrize("module", [qwen3_next, qwen3_5], ids=["qwen3-next", "qwen3.5"])
def test_a_model_with_ours(module, monkeypatch):
    """A small model whose delta rules are ours: the same logits and gradients."""
    model = small_model(module)
    inputs = {"input_ids": torch.randint(61, (2, 70))}
    expected = train_step(model, **inputs)
    calls = []
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", known_only(delta_rule, calls))
    with env.override(strict=True):
        actual = train_step(model, **inputs)
    assert len(calls) == 3  # the fourth layer is one of attention
    of_decay = [name for name in expected if re.search("A_log|dt_bias|in_proj_(a|ba)\\.", name)]
    for name in of_decay:  # theirs has lost 2 to 4 digits more than ours, against fp64
        assert_close(name, actual.pop(name), expected.pop(name), Tolerance(0.1, 3e-5))
    assert len(of_decay) == 9
    assert_same_steps(actual, expected)


@pytest.mark.parametrize("module", [qwen3_next, qwen3_5], ids=["qwen3-next", "qwen3.5"])
def test_a_model_writes_the_same_with_ours(module, monkeypatch):
    """The prompt by chunks, then token by token from the state."""
    model = small_model(module).eval()
    prompt = torch.randint(61, (1, 37))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    calls, one = [], npu_ops.fused_recurrent_gated_delta_rule
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", known_only(delta_rule, calls))
    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", known_only(one, calls))
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert calls == 3 * [OP] + 15 * ["fused_recurrent_gated_delta_rule"]


# Mistakes


MISTAKES = [
    ({"q": lambda x: x.long()}, TypeError, "q"),
    ({"q": lambda x: x.half()}, TypeError, "k"),
    ({"v": lambda x: x.half()}, TypeError, "v"),
    ({"v": lambda x: x.to("meta")}, ValueError, "v"),
    ({"q": lambda x: x[0]}, ValueError, "q"),
    ({"k": lambda x: x[:, :5]}, ValueError, "k"),
    ({"v": lambda x: x[:, :5]}, ValueError, "v"),
    ({"v": lambda x: x.repeat(1, 1, 1, 11)}, ValueError, "v"),
    ({"q": lambda x: x.repeat(1, 1, 3, 1), "k": lambda x: x.repeat(1, 1, 3, 1)}, ValueError, "v"),
    ({"g": lambda x: None}, TypeError, "g"),
    ({"g": lambda x: x[..., None]}, ValueError, "g"),
    ({"g": lambda x: x.int()}, TypeError, "g"),
    ({"beta": lambda x: None}, TypeError, "beta"),
    ({"beta": lambda x: x[:, :, :1]}, ValueError, "beta"),
    ({"initial_state": lambda x: x.bfloat16()}, TypeError, "initial_state"),
    ({"initial_state": lambda x: x.transpose(-1, -2)}, ValueError, "initial_state"),
    ({"state_v_first": lambda x: True}, ValueError, "initial_state"),
    ({"initial_state": lambda x: x.repeat(2, 1, 1, 1)}, ValueError, "initial_state"),
    ({"cu_seqlens": lambda x: [0, 40]}, TypeError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([0.0, 40.0])}, TypeError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([40])}, ValueError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([0, 41])}, ValueError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([1, 40])}, ValueError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([0, 6, 4, 40])}, ValueError, "cu_seqlens"),
    ({"cu_seqlens": lambda x: torch.tensor([0, 4, 40])}, ValueError, "initial_state"),
    ({"cu_seqlens_cpu": lambda x: torch.tensor([0, 40])}, ValueError, "cu_seqlens_cpu"),
    ({"chunk_indices": lambda x: torch.tensor([[0, 0]])}, ValueError, "chunk_indices"),
    ({"chunk_size": lambda x: 128}, ValueError, "chunk_size"),
    ({"allow_neg_eigval": lambda x: True}, ValueError, "allow_neg_eigval"),
    ({"use_gate_in_kernel": lambda x: True}, ValueError, "A_log"),
    ({"A_log": lambda x: torch.zeros(2)}, ValueError, "A_log"),
    ({"dt_bias": lambda x: torch.zeros(2)}, ValueError, "dt_bias"),
    (
        {"use_gate_in_kernel": lambda x: True, "A_log": lambda x: torch.zeros(1)},
        ValueError,
        "A_log",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, argument", MISTAKES)
def test_mistake(changes, error, argument):
    inputs = qkv()
    changed = inputs | {name: change(inputs.get(name)) for name, change in changes.items()}
    for call in (delta_rule, functools.partial(npu_ops.explain, delta_rule)):
        with pytest.raises(error, match=f"^{re.escape(argument)}: "):
            call(**changed)


@pytest.mark.parametrize("name", ["head_first", "transpose_state_layout", "cp_context"])
def test_an_argument_that_is_not_there(name):
    with pytest.raises(TypeError, match=name):
        delta_rule(**qkv(), **{name: True})


def test_batch_with_packed_sequences():
    with pytest.raises(ValueError, match="cu_seqlens: got one with batch 2, needs batch 1"):
        delta_rule(**qkv(2), cu_seqlens=torch.tensor([0, 40]))


def test_a_compiled_call_reads_nothing_outside():
    inputs = qkv()
    del inputs["initial_state"]
    compiled = torch.compile(
        lambda cu_seqlens: delta_rule(**inputs, cu_seqlens=cu_seqlens)[0],
        fullgraph=True, backend="eager",
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="cu_seqlens: got 0 first and 41 last, needs 0 and up to 40"
    ):
        compiled(torch.tensor([0, 4, 41]))
    torch._dynamo.reset()


def test_strict_mode_runs_kernels():
    with env.override(strict=True):
        delta_rule(**qkv(dtype=torch.float16))
