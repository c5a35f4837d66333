"""The states before each chunk, which a server keeps for prompts with a common prefix."""

import pytest
import torch
from chunk_calls import delta_rule, qkv
from support import devices, every_implementation, forced, on_device

from npu_ops.core.compare import assert_close
from npu_ops.ops.chunk_gated_delta_rule import op
from npu_ops.ops.chunk_gated_delta_rule.cases import TOLERANCES

IMPLEMENTATIONS = every_implementation(op.prefill)
PREFILL = "chunk_gated_delta_rule_prefill"
STARTS = torch.tensor([0, 33, 33, 97, 98, 130])  # 2, 0, 2, 1 and 1 chunks of 32 tokens
FIRSTS = (0, 2, 2, 4, 5, 6)


def call(packed, v_first=False, device="cpu", dtype=torch.float32, **changes):
    inputs = qkv(*((1, 130) if packed else (2, 70)), dtype=dtype) | {"chunk_size": 32}
    if packed:
        draw = torch.Generator().manual_seed(3)
        inputs |= {"cu_seqlens": STARTS, "initial_state": torch.randn(5, 2, 16, 24, generator=draw)}
    if v_first:
        inputs |= {"state_v_first": True, "initial_state": inputs["initial_state"].mT.contiguous()}
    return on_device(inputs | changes, device)


def run(implementation, inputs):
    with forced(implementation, PREFILL):
        return delta_rule(**inputs, return_intermediate_states=True)


def before(inputs, batch, begin, tokens, n):
    """Return the state of sequence n after its first `tokens` tokens."""
    state = inputs["initial_state"][n : n + 1]
    if not tokens:
        return state[0]
    parts = ("q", "k", "v", "g", "beta")
    given = {x: inputs[x][batch : batch + 1, begin : begin + tokens] for x in parts}
    rest = {x: inputs[x] for x in inputs if x not in (*parts, "initial_state", "cu_seqlens")}
    return delta_rule(**given, **rest, initial_state=state)[1][0]


@IMPLEMENTATIONS
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_state_before_each_chunk(packed, v_first, implementation, device):
    inputs = call(packed, v_first, device)
    o, final, states = run(implementation, inputs)
    right = delta_rule(**inputs)
    tolerance = TOLERANCES[torch.float32]
    assert_close("o", o, right[0], tolerance)
    assert_close("final_state", final, right[1], tolerance)
    if packed:
        assert states.shape[0] == 130 // 32 + 5 and not states[FIRSTS[-1] :].any()
        places = [(0, int(STARTS[n]), i * 32, n, FIRSTS[n] + i)
                  for n in range(5) for i in range(FIRSTS[n + 1] - FIRSTS[n])]  # fmt: skip
    else:
        assert states.shape[0] == 6
        places = [(n, 0, i * 32, n, 3 * n + i) for n in range(2) for i in range(3)]
    for batch, begin, tokens, n, row in places:
        expected = before(inputs, batch, begin, tokens, n)
        assert_close(f"states[{row}]", states[row], expected, tolerance)


@pytest.mark.parametrize("device", devices())
def test_a_prompt_that_begins_alike_goes_on_from_a_state(device):
    inputs = call(False, device=device)
    o, final, states = delta_rule(**inputs, return_intermediate_states=True)
    rest = {n: inputs[n][:, 64:] for n in ("q", "k", "v", "g", "beta")}
    again, end = delta_rule(**inputs | rest | {"initial_state": states[2::3].contiguous()})
    assert_close("o", again, o[:, 64:], TOLERANCES[torch.float32])
    assert_close("final_state", end, final, TOLERANCES[torch.float32])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 128), (torch.float32, 160)])
def test_with_norms_and_gates_inside(dtype, width, implementation, device):
    """Qwen3-Next's call, and heads so wide that Triton halves the requested chunk size."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 150, 1, width, generator=draw).to(dtype) for _ in range(2))
    v = torch.randn(1, 150, 2, width, generator=draw).to(dtype)
    g, beta = (torch.randn(1, 150, 2, generator=draw).to(dtype) for _ in range(2))
    inputs = on_device(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": torch.zeros(2),
         "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
         "use_beta_sigmoid_in_kernel": True}, device,
    )  # fmt: skip
    o, none, states = run(implementation, inputs)
    right = delta_rule(**inputs, output_final_state=True)
    assert none is None and states.shape == (3, 2, width, width)
    assert_close("o", o, right[0], TOLERANCES[dtype])
    cut = {n: x[:, :128] if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    _, middle = delta_rule(**cut, output_final_state=True)
    assert not states[0].any()
    assert_close("states[2]", states[2], middle[0], TOLERANCES[dtype])


def test_no_tokens():
    inputs = call(True)
    none = {n: inputs[n][:, :0] for n in ("q", "k", "v", "g", "beta")}
    o, final, states = delta_rule(
        **inputs | none | {"cu_seqlens": torch.zeros(6, dtype=torch.int32)},
        return_intermediate_states=True,
    )
    assert not o.numel() and torch.equal(final, inputs["initial_state"]) and not states.any()


def test_compiled():
    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager")
    found = compiled(**call(True), return_intermediate_states=True)
    for one, other in zip(found, run("cpu", call(True)), strict=True):
        assert torch.equal(one, other)
    torch._dynamo.reset()


def test_a_gradient_is_refused():
    inputs = call(False)
    inputs["k"].requires_grad_()
    with pytest.raises(ValueError, match=r"^k: .* needs torch.no_grad\(\)"):
        delta_rule(**inputs, return_intermediate_states=True)
    with torch.no_grad():
        assert len(delta_rule(**inputs, return_intermediate_states=True)) == 3
