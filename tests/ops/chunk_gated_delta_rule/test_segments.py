"""Long sequences with few heads: an NPU runs column blocks of V and segments in parallel."""

import pytest
import torch
from chunk_calls import delta_rule, qkv, run
from npu_ops_tools.compile.launches import recorded
from support import (
    assert_all_close,
    every_implementation,
    floats,
    forced,
    implementations,
    on_device,
    on_npu,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_ops.core import hardware, registry
from npu_ops.core.compare import assert_close
from npu_ops.ops.chunk_gated_delta_rule import op, triton_ascend
from npu_ops.ops.chunk_gated_delta_rule.cases import TOLERANCES
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import chunks

IMPLEMENTATIONS = every_implementation(op.forward)


def call(batch=1, state="k", dtype=torch.float32, packed=False):
    """Return arguments with two value heads.

    packed: four sequences, of which the second is empty and the third has one token.
    """
    inputs = qkv(batch, 150, 1, 2, dtype=dtype)
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 80, 80, 81, 150])
        inputs["initial_state"] = inputs["initial_state"].repeat(4, 1, 1, 1)
    if state == "v":
        state = {"initial_state": inputs["initial_state"].mT.contiguous(), "state_v_first": True}
        return inputs | state
    return inputs if state == "k" else inputs | {"initial_state": None}


@pytest.fixture
def many_cores(monkeypatch):
    """Pretend an NPU with 48 cores, and allow segments of one chunk."""
    monkeypatch.setattr(hardware, "num_cube_cores", lambda device: 48)
    monkeypatch.setattr(triton_ascend, "SEGMENT", 1)


CALLS = pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(call(), id="k-first"),
        pytest.param(call(2, state="v"), id="v-first"),
        pytest.param(call(state="none"), id="no-state"),
        pytest.param(call(packed=True, state="v"), id="packed"),
        pytest.param(call(dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(call(dtype=torch.float16, packed=True), id="float16"),
    ],
)


@IMPLEMENTATIONS
@CALLS
def test_segments_are_the_whole(inputs, implementation, device, many_cores):
    with forced("reference", "chunk_gated_delta_rule"):
        expected = delta_rule(**floats(inputs, torch.float64))
    with forced(implementation, "chunk_gated_delta_rule"):
        actual = delta_rule(**on_device(inputs, device))
    tolerance = TOLERANCES[inputs["q"].dtype]
    for name, one, other in zip(("o", "final_state"), actual, expected, strict=True):
        assert_close(name, one.cpu(), other, tolerance)


@IMPLEMENTATIONS
@CALLS
def test_gradients_of_segments_are_those_of_the_whole(inputs, implementation, device, many_cores):
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    tolerance = TOLERANCES[inputs["q"].dtype]
    assert_all_close(actual, expected, dict.fromkeys(TOLERANCES, tolerance))


@pytest.mark.parametrize("implementation, device", implementations(op.prefill.table))
@pytest.mark.parametrize("packed", [False, True])
def test_the_states_before_chunks_of_segments(packed, implementation, device, many_cores):
    inputs, name = call(packed=packed) | {"chunk_size": 32}, "chunk_gated_delta_rule_prefill"
    with forced("reference", name):
        expected = delta_rule(**floats(inputs, torch.float64), return_intermediate_states=True)
    with forced(implementation, name):
        actual = delta_rule(**on_device(inputs, device), return_intermediate_states=True)
    for name, one, other in zip(("o", "final_state", "states"), actual, expected, strict=True):
        assert_close(name, one.cpu(), other, TOLERANCES[torch.float32])


@IMPLEMENTATIONS
@pytest.mark.parametrize("walked", ["columns", "columns in a second launch", "segments"])
def test_the_same_bits_each_time(walked, implementation, device, monkeypatch):
    cores = {"columns": 4, "columns in a second launch": 3, "segments": 48}[walked]
    monkeypatch.setattr(hardware, "num_cube_cores", lambda device: cores)
    monkeypatch.setattr(triton_ascend, "SEGMENT", 1)
    heads = 4 if cores == 3 else 2
    inputs = qkv(1, 130, 2, heads, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(1)
    inputs["v"] = torch.randn(1, 130, heads, 64, generator=draw).bfloat16()
    inputs["initial_state"] = torch.randn(1, heads, 16, 64, generator=draw)
    first, second = (run(implementation, on_device(inputs, device)) for _ in range(2))
    assert len(first) == 8 and all(torch.equal(first[name], second[name]) for name in first)


# The launches of a call


def launches(sequences, heads, tokens, keys=128, dtype=torch.bfloat16, backward=False):
    """Return (kernel, programs, columns per program) of the scan launches on 24 cube cores."""
    q = torch.zeros(sequences, tokens, heads, keys, dtype=dtype)
    v, gates = q.new_zeros(sequences, tokens, heads, 128), torch.zeros(sequences, tokens, heads)
    with (
        recorded("") as found,
        registry.as_if_on("npu"),
        hardware.as_if_soc("Ascend910B2", (24, 48)),
    ):
        out, _ = delta_rule(q, q, v.requires_grad_(backward), gates, gates)
        if backward:
            found.clear()
            out.sum().backward()
    walks = (
        "ends_kernel", "gradient_ends_kernel", "join_kernel", "forward_kernel", "states_kernel",
        "state_gradients_kernel",
    )  # fmt: skip
    return [
        (each.name.removesuffix("_kernel"), *each.grid, dict(each.constants)["BV"])
        for each in found
        if each.name in walks
    ]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((1, 4, 64), [("forward", 16, 32)]),
        ((1, 12, 64), [("forward", 24, 64)]),
        ((2, 1, 64), [("forward", 8, 32)]),
        ((1, 24, 512), [("forward", 24, 128)]),
        ((1, 32, 512), [("forward", 24, 128), ("forward", 16, 64)]),
        ((8, 4, 512), [("forward", 24, 128), ("forward", 16, 64)]),
        ((1, 32, 256), [("forward", 24, 128)]),  # too short to be worth a second launch
        # 16 heads are left; two column blocks for each do not fit 24 cores
        ((1, 40, 512), [("forward", 24, 128)]),
        # Segments per head: 4 with 4 heads, 7 with 2, 13 with 1. A segment maps a state S to
        # M S + h. All but the last compute h; all but the first and last compute M, as wide as h.
        ((1, 4, 4096), [("ends", 20, 128), ("join", 16, 32), ("forward", 16, 128)]),
        ((2, 1, 8192), [("ends", 22, 128), ("join", 8, 32), ("forward", 14, 128)]),
        ((1, 1, 16384), [("ends", 23, 128), ("join", 4, 32), ("forward", 13, 128)]),
        ((1, 4, 4032), [("forward", 16, 32)]),  # too short for four segments
        ((1, 6, 8192), [("forward", 24, 32)]),  # there are cores for only three segments each
        ((1, 1, 8192, 192), [("forward", 4, 32)]),
        # fp32 has room for half the columns
        ((1, 4, 4096, 128, torch.float32), [("forward", 16, 32)]),
    ],
)
def test_idle_cores_get_columns_and_segments(arguments, expected):
    assert launches(*arguments) == expected


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((1, 4, 64), [("states", 16, 32), ("state_gradients", 16, 32)]),
        (
            (2, 1, 8192),
            [
                ("ends", 22, 128), ("join", 8, 32), ("gradient_ends", 22, 128), ("join", 8, 32),
                ("states", 14, 128), ("state_gradients", 14, 128),
            ],
        ),
    ],
)  # fmt: skip
def test_the_backwards_walks_are_cut_too(arguments, expected):
    assert launches(*arguments, backward=True) == expected


@on_npu
@pytest.mark.parametrize(
    "batch, length, size", [(1, 1, 64), (1, 640, 64), (3, 65, 32), (300, 70, 16)]
)
def test_sequences_of_one_length_lie_as_packed_ones_do(batch, length, size, device):
    """The chunk table of equal lengths, built by its own kernel, equals that of
    packed sequences."""
    q = torch.empty(batch, length, 1, 1, device=device)
    starts = torch.arange(batch + 1, device=device) * length
    ours = chunks.chunks_of(q, None, size)
    packed = chunks.chunks_of(q.view(1, -1, 1, 1), starts, size)
    assert ours.number == batch * -(-length // size) and ours.sequences == packed.sequences
    assert torch.equal(ours.spans, packed.spans[: ours.number])
    assert torch.equal(ours.starts, packed.starts) and torch.equal(ours.firsts, packed.firsts)


def test_gpus_have_no_segments():
    with FakeTensorMode():
        x = torch.empty(1, 1 << 20, 1, 128, device="cuda")
        assert triton_ascend._segments(x, x, 1, 64) == 1
