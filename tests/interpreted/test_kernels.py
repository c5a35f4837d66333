"""Every Triton kernel's arithmetic, in Triton's interpreter, against the reference."""

import dataclasses
import itertools
import pkgutil

import pytest
import torch
from support import DTYPES, evaluate, floats, forced, named

import npu_ops
from npu_ops import ops
from npu_ops.core import cases, hardware, indices, registry, rng
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.bias_dropout_add.triton_ascend import bias_dropout_add
from npu_ops.ops.chunk_gated_delta_rule import cases as chunk_cases
from npu_ops.ops.chunk_gated_delta_rule import triton_ascend as chunk_gated_delta_rule
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import chunks

OPS = [module.name for module in pkgutil.iter_modules(ops.__path__)]


def small_cases():
    """Return the small cases of unusual shapes, and the models' cases with one token.

    `make test` runs one dtype of each, as the emulated NPU runs the same kernels compiled.
    """
    chosen = []
    for op in OPS:
        for case in cases.of(op).CASES:
            model = case.name.startswith("qwen")
            if case.large or case.tokens > (1 if model else 65):
                continue
            dtypes = (
                (torch.bfloat16,) if model else DTYPES if case.tokens <= 1 else (torch.float32,)
            )
            chosen += [
                pytest.param(
                    op, case, dtype, id=f"{op}-{case.name}-{named(dtype)}",
                    marks=[] if dtype == dtypes[0] else [pytest.mark.slow],
                )
                for dtype in dtypes
            ]  # fmt: skip
    return chosen


def run(op, case, inputs, wrt):
    torch.manual_seed(1)  # both runs must draw the same mask
    return evaluate(cases.function(op, case), inputs, wrt)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("op, case, dtype", small_cases())
def test_against_reference(op, case, dtype):
    wrt = cases.differentiable(op, case)
    wrt = tuple(name for name in wrt if case.inputs(dtype).get(name) is not None)
    with forced("reference", op, f"{op}_backward"):
        expected = run(op, case, floats(case.inputs(dtype), torch.float64), wrt)
    with registry.as_if_on("npu"):
        actual = run(op, case, case.inputs(dtype), wrt)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        within = cutting_off(value.dtype, cases.tolerance(op, name, value, dtype))
        assert_close(name, value, expected[name], within)


def cutting_off(dtype, tolerance):
    """Return the tolerance, doubled for bfloat16.

    The interpreter truncates float32 to bfloat16; hardware rounds to nearest.
    """
    twice = Tolerance(2 * tolerance.ratio, 2 * tolerance.max_abs)
    return twice if dtype == torch.bfloat16 else tolerance


@pytest.mark.parametrize("shape", [(5, 129), (70, 1000), (1, 7), (3, 2, 256), (2, 4096)], ids=str)
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9999999])
def test_mask_is_the_reference_s(shape, p):
    """Dropout drops the same elements as the reference; seed and offset exceed 32 bits."""
    state = torch.tensor([(123456789 << 32) + 987654321, (555 << 32) + 7])
    out = torch.full(shape, float("nan"))
    bias_dropout_add(torch.ones(shape), None, torch.zeros(shape), state, p, out)
    rows = out.numel() // shape[-1]
    assert torch.equal(out.view(rows, -1) != 0, rng.keep_mask(rows, shape[-1], p, state))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=named)
def test_positions(dtype, monkeypatch):
    """Each position selects a row of the table. A position outside it gives NaN for
    its token only."""
    cos, sin = torch.randn(7, 16), torch.randn(7, 16)
    q = torch.randn(4, 2, 16)
    positions = torch.tensor([6, 0, 3, 3], dtype=dtype)
    expected, _ = npu_ops.apply_rotary_pos_emb(q, None, cos, sin, positions)
    with registry.as_if_on("npu"):
        actual, _ = npu_ops.apply_rotary_pos_emb(q, None, cos, sin, positions)
    assert_close("q", actual, expected, Tolerance(1e-7, 3e-7))
    outside = torch.tensor([[6, 7, -1, 3]], dtype=dtype)
    monkeypatch.setattr(indices, "check_within", lambda *_: None)  # on the CPU it would raise
    arguments = (cos[None], sin[None], outside, "TND", "half", False, 16)
    with registry.as_if_on("npu"):
        actual, _ = torch.ops.npu_ops.rope(q, q[:, :0], *arguments)
    assert actual[[1, 2]].isnan().all()
    assert_close("q", actual[[0, 3]], expected[[0, 3]], Tolerance(1e-7, 3e-7))


def test_cached_multimodal_positions():
    positions, cache = torch.randint(40, (3, 9)), torch.randn(40, 32)
    q, k = torch.randn(9, 4, 48), torch.randn(9, 1, 48)
    arguments = (positions, q, k, cache, [6, 5, 5], "interleaved")
    expected = npu_ops.apply_multimodal_rotary_pos_emb_cached(*arguments)
    with registry.as_if_on("npu"):
        actual = npu_ops.apply_multimodal_rotary_pos_emb_cached(*arguments)
    for name, one, other in zip("qk", actual, expected, strict=True):
        assert_close(name, one, other, Tolerance(1e-7, 3e-7))


def test_in_place_leaves_the_tail():
    q = torch.randn(6, 2, 48)
    cos, sin = torch.randn(6, 16), torch.randn(6, 16)
    expected, _ = npu_ops.apply_rotary_pos_emb(q, None, cos, sin)
    with registry.as_if_on("npu"):
        npu_ops.apply_rotary_pos_emb(q, None, cos, sin, inplace=True)
    assert_close("q", q, expected, Tolerance(1e-7, 3e-7))


@pytest.mark.parametrize("op", ["gdn_gate", "gated_delta_rule_update"])
@pytest.mark.parametrize("beta, threshold", [(0.5, 20.0), (3.0, 0.0), (1.0, 2.0)])
def test_another_softplus(op, beta, threshold):
    case = cases.of(op).CASES[-3]
    inputs = case.inputs(torch.float32) | {"softplus_beta": beta, "softplus_threshold": threshold}
    wrt = [name for name in cases.differentiable(op, case) if inputs.get(name) is not None]
    with forced("reference", op, f"{op}_backward"):
        expected = run(op, case, floats(inputs, torch.float64), wrt)
    with registry.as_if_on("npu"):
        actual = run(op, case, inputs, wrt)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_close(name, value, expected[name], cases.tolerance(op, name, value, torch.float32))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_segments_of_the_chunked_delta_rule(state_v_first, monkeypatch):
    """As on an NPU with 24 cube cores, with segments allowed to be one chunk long."""
    monkeypatch.setattr(chunk_gated_delta_rule, "SEGMENT", 1)
    case = next(each for each in chunk_cases.CASES if each.name == "dense")
    case = dataclasses.replace(case, tokens=75, state="v" if state_v_first else "k")
    inputs = case.inputs(torch.float32)
    wrt = tuple(name for name in chunk_cases.DIFFERENTIABLE if inputs.get(name) is not None)
    rule, exact = npu_ops.chunk_gated_delta_rule, floats(inputs, torch.float64)
    with forced("reference", "chunk_gated_delta_rule"):
        expected = evaluate(rule, exact, wrt)
    with registry.as_if_on("npu"), hardware.as_if_soc("Ascend910B2", (24, 48)):
        actual = evaluate(rule, inputs, wrt)
    assert actual.keys() == expected.keys()
    for name, one in actual.items():
        assert_close(name, one, expected[name], chunk_cases.TOLERANCES[torch.float32])


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("sequences, longest", [(1, 1), (4, 300), (90, 3), (150, 70)])
@pytest.mark.parametrize("kind", ["right", "tokens behind the last", "wrong"])
def test_the_chunks_of_packed_sequences(size, sequences, longest, kind):
    """Covers more sequences than a tile holds, empty ones, and wrong lengths, which are clamped."""
    draw = torch.Generator().manual_seed(sequences + size)
    lengths = torch.randint(0, longest + 1, (sequences,), generator=draw)
    cu_seqlens = torch.tensor([0, *lengths.cumsum(0)])
    tokens = max(int(cu_seqlens[-1]), 1) + 7 * (kind == "tokens behind the last")
    if kind == "wrong":
        cu_seqlens = torch.randint(-9, tokens + 20, (sequences + 1,), generator=draw)
    found = chunks.chunks_of(torch.zeros(1, tokens, 1, 16), cu_seqlens, size)
    starts = [max(cu_seqlens[: n + 1].clamp(0, tokens)).item() for n in range(sequences + 1)]
    spans, firsts = [], []
    for begin, end in itertools.pairwise(starts):
        firsts.append(len(spans))
        spans += [[n, min(size, end - n)] for n in range(begin, end, size)]
    assert found.starts.tolist() == starts and found.firsts.tolist() == firsts
    used = len(spans) if kind != "wrong" else min(len(spans), found.number)
    assert found.spans[:used].tolist() == spans[:used]
    assert found.spans[used:, 1].eq(0).all() and found.number == len(found.spans)
