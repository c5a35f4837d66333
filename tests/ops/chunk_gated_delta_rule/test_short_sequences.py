"""Sequences of a few tokens on the CPU, computed token by token: the results equal
those by chunks."""

import time

import pytest
import torch
from support import assert_all_close, evaluate, floats, forced

import npu_ops
from npu_ops.ops.chunk_gated_delta_rule.cases import TOLERANCES
from npu_ops.ops.chunk_gated_delta_rule.sequences_cpu import SHORT

OPS = "chunk_gated_delta_rule", "chunk_gated_delta_rule_backward"
LENGTHS = [1, 0, SHORT, SHORT + 1, 2, 40, 1, 1]
WRT = ("q", "k", "v", "g", "beta", "initial_state")


def call(lengths=LENGTHS, behind=0, **changes):
    draw = torch.Generator().manual_seed(0)
    tokens, count = sum(lengths) + behind, len(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    return {
        "q": normal(1, tokens, 2, 16), "k": normal(1, tokens, 2, 16),
        "v": normal(1, tokens, 4, 24), "g": -normal(1, tokens, 4).abs(),
        "beta": normal(1, tokens, 4).sigmoid(), "initial_state": normal(count, 4, 16, 24),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "chunk_size": 16,
    } | changes  # fmt: skip


def run(implementation, arguments, wrt=WRT):
    with forced(implementation, *OPS):
        return evaluate(npu_ops.chunk_gated_delta_rule, arguments, wrt)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_they_are_the_reference(norm, v_first):
    arguments = call(behind=2, use_qk_l2norm_in_kernel=norm, state_v_first=v_first)
    if not norm:
        arguments |= {name: arguments[name] / 4 for name in ("q", "k")}
    if v_first:
        arguments["initial_state"] = arguments["initial_state"].mT.contiguous()
    expected = run("reference", floats(arguments, torch.float64))
    assert_all_close(run("cpu", arguments), expected, TOLERANCES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_is_as_alone_bit_for_bit(dtype):
    arguments = call()
    arguments |= {name: arguments[name].to(dtype) for name in ("q", "k", "v")}
    o, final = npu_ops.chunk_gated_delta_rule(**arguments)
    begin = 0
    for n, length in enumerate(LENGTHS):
        one = {x: arguments[x][:, begin : begin + length] for x in WRT[:5]}
        one |= {"initial_state": arguments["initial_state"][n : n + 1], "cu_seqlens": None}
        if length:
            alone, state = npu_ops.chunk_gated_delta_rule(**arguments | one)
            assert torch.equal(o[:, begin : begin + length], alone)
            assert torch.equal(final[n : n + 1], state)
        begin += length


def test_a_batch_of_short_ones_is_the_reference():
    arguments = call([2] * 6)
    for name in WRT[:5]:
        arguments[name] = arguments[name].view(6, 2, *arguments[name].shape[2:])
    arguments["cu_seqlens"] = None
    expected = run("reference", floats(arguments, torch.float64))
    assert_all_close(run("cpu", arguments), expected, TOLERANCES)


def test_states_before_chunks():
    arguments = call(return_intermediate_states=True)
    found = npu_ops.chunk_gated_delta_rule(**arguments)
    with forced("reference", "chunk_gated_delta_rule_prefill"):
        expected = npu_ops.chunk_gated_delta_rule(**arguments)
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


def test_many_of_one_token_cost_no_chunk_each():
    """With a chunk for each, these 5000 sequences of one token took 0.85 s of CPU time."""
    arguments = call([1] * 5000)
    npu_ops.chunk_gated_delta_rule(**arguments)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        npu_ops.chunk_gated_delta_rule(**arguments)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3
