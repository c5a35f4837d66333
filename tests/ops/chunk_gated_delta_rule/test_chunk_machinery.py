"""The chunked gated delta rule: torch operator rules, use in models, invalid calls."""

import inspect
import re
import types

import pytest
import torch
from chunk_calls import BY_TOKEN, OP, delta_rule, qkv
from support import (
    assert_same_steps,
    floats,
    train_step,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.chunk_gated_delta_rule import op, sequences_cpu

# As a torch operator


def operator_inputs(packed):
    """Return the operator's positional arguments, for six tokens in fp64."""
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


@pytest.mark.parametrize("normalized", [True, False])
def test_only_the_inputs_are_kept(normalized):
    inputs = qkv(1, 200) | {"use_qk_l2norm_in_kernel": normalized}
    leaves = {name: inputs[name].requires_grad_() for name in (*BY_TOKEN, "initial_state")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        delta_rule(**inputs)
    own = {x.data_ptr() for x in leaves.values()}
    assert kept and {x.data_ptr() for x in kept} <= own


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
    """Wrap a kernel as transformers does: pass only the keywords it knows. Record the calls."""
    known = inspect.signature(function).parameters

    def call(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **{n: x for n, x in kwargs.items() if n in known})

    return call


@pytest.mark.parametrize("module", [qwen3_next, qwen3_5], ids=["qwen3-next", "qwen3.5"])
def test_a_model_with_ours(module, monkeypatch):
    """A small model whose delta rule is replaced by ours has the same logits and gradients."""
    model = small_model(module)
    inputs = {"input_ids": torch.randint(61, (2, 70))}
    expected = train_step(model, **inputs)
    calls = []
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", known_only(delta_rule, calls))
    with env.override(strict=True):
        actual = train_step(model, **inputs)
    assert len(calls) == 3  # the fourth layer is attention
    of_decay = [name for name in expected if re.search("A_log|dt_bias|in_proj_(a|ba)\\.", name)]
    for name in of_decay:  # against fp64, transformers' gradients lose 2 to 4 more digits
        assert_close(name, actual.pop(name), expected.pop(name), Tolerance(0.1, 3e-5))
    assert len(of_decay) == 9
    assert_same_steps(actual, expected)


@pytest.mark.parametrize("module", [qwen3_next, qwen3_5], ids=["qwen3-next", "qwen3.5"])
def test_a_model_writes_the_same_with_ours(module, monkeypatch):
    """The prompt runs in chunks, then each new token by the recurrence from the state."""
    model = small_model(module).eval()
    prompt = torch.randint(61, (1, 37))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    calls, one = [], npu_ops.fused_recurrent_gated_delta_rule
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", known_only(delta_rule, calls))
    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", known_only(one, calls))
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert calls == 3 * [OP] + 15 * ["fused_recurrent_gated_delta_rule"]


# Invalid calls


@pytest.mark.parametrize("name", ["head_first", "transpose_state_layout", "cp_context"])
def test_an_argument_that_is_not_there(name):
    with pytest.raises(TypeError, match=name):
        delta_rule(**qkv(), **{name: True})


def test_strict_mode_runs_kernels():
    with env.override(strict=True):
        delta_rule(**qkv(dtype=torch.float16))


@pytest.mark.parametrize(
    "changes, why_not, keeps_no_states",
    [
        ({}, None, None),
        ({"chunk_size": 32}, None, None),
        ({"chunk_size": 16}, None, "it returns states of chunks of 32 tokens or more, not 16"),
        ({"chunk_size": 8}, "it has no kernel for chunks of 8", "it returns states of chunks of"),
        ({"keys": 256, "values": 256}, None, None),
        ({"keys": 257}, "K is 257, above 256", "K is 257, above 256"),
        ({"values": 257}, "V is 257, above 256", "V is 257, above 256"),
        ({"tokens": 1 << 22}, None, None),
        ({"tokens": (1 << 22) - 1, "packed": True}, None, None),
        ({"tokens": 1 << 22, "packed": True}, "it supports fewer than", "it supports fewer than"),
    ],
)  # fmt: skip
def test_what_the_triton_kernels_decline(changes, why_not, keeps_no_states):
    call = {"keys": 8, "values": 8, "tokens": 9, "packed": False, "chunk_size": 64} | changes
    q, v = (torch.empty(1, call["tokens"], 1, call[n], device="meta") for n in ("keys", "values"))
    starts = torch.zeros(2, dtype=torch.int32) if call["packed"] else None
    arguments = types.SimpleNamespace(q=q, v=v, cu_seqlens=starts, chunk_size=call["chunk_size"])
    said = op.triton_why_not(arguments), op._triton_keeps_no_states(arguments)
    for one, expected in zip(said, (why_not, keeps_no_states), strict=True):
        assert one == expected or one.startswith(expected)


def test_scratch_memory_is_kept():
    """Scratch memory is on the host, even if the default device is another when it is allocated."""
    scratch = sequences_cpu.Scratch()
    with torch.device("meta"):
        first = scratch("a", 2, 3)
    assert first.device.type == "cpu" and first.shape == (2, 3)
    assert scratch("a", 6).data_ptr() == scratch("a", 1, 2).data_ptr() == first.data_ptr()
    assert scratch("a", 7).shape == (7,)
