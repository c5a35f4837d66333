"""Attention on the CPU by torch's flash attention, forced here for short sequences too."""

import pytest
import test_attention
import test_attention_machinery as machinery
import torch
from attention_calls import run
from support import DTYPES, assert_all_close, floats, parametrize_cases, parametrize_dtypes

from npu_ops.ops.attention import cpu, short
from npu_ops.ops.attention.cases import CASES, TOLERANCES

ON_CPU = "cpu", "cpu"


@pytest.fixture(autouse=True)
def no_short_sequences(monkeypatch):
    monkeypatch.setattr(short, "_DTYPES", ())


@parametrize_cases(CASES, large=False)
@parametrize_dtypes()
def test_against_reference(case, dtype):
    test_attention.test_against_reference(case, dtype, *ON_CPU)


@test_attention.EACH_RULE
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6)], ids=str)
def test_one_hot_values_reveal_the_softmax(call, sees, lengths):
    test_attention.test_one_hot_values_reveal_the_softmax(call, sees, lengths, "cpu")


@test_attention.EACH_RULE
def test_packed_is_each_sequence_by_itself(call, sees):
    test_attention.test_packed_is_each_sequence_by_itself(call, sees, "cpu")


@pytest.mark.parametrize("mask", machinery.MASKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_takes_no_part_does_not_matter(mask, value):
    machinery.test_what_takes_no_part_does_not_matter(mask, value, *ON_CPU)


@pytest.mark.parametrize("keys", [1, 3, 15, 40])
@pytest.mark.parametrize("asked", [{}, {"is_causal": True}, {"window": (1, 1)}], ids=str)
def test_scores_that_are_all_nan_are_not_no_keys(asked, keys):
    machinery.test_scores_that_are_all_nan_are_not_no_keys(asked, keys, *ON_CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_share_keys_are_queries_of_one_head(dtype, monkeypatch):
    """Query heads that share keys become queries of one head, so decoding reads each key once."""
    draw, flash, asked = torch.Generator().manual_seed(0), cpu._flash, []
    q, k, v = (
        torch.randn(3, n, h, 16, generator=draw).to(dtype) for n, h in ((1, 8), (40, 2), (40, 2))
    )

    def watched(q, k, v, *settings, **named):
        asked.append((q.shape, k.shape))
        return flash(q, k, v, *settings, **named)

    monkeypatch.setattr(cpu, "_flash", watched)
    inputs = {"q": q, "k": k, "v": v, "is_causal": True, "return_lse": True}
    actual = run(inputs, implementation="cpu")
    assert asked == [((3, 2, 4, 16), (3, 2, 40, 16))]
    expected = run(floats(inputs, torch.float64), implementation="reference")
    assert_all_close(actual, expected, dict.fromkeys(TOLERANCES, TOLERANCES[dtype]))


@pytest.mark.parametrize("has", [True, False])
def test_bf16_is_widened_where_torch_has_no_products_of_it(has, monkeypatch):
    """Only the backward widens to fp32: the forward multiplies in fp32 anyway."""
    monkeypatch.setattr(cpu, "_multiplies_bf16", lambda: has)
    q = torch.ones(1, 1, 600, 8, dtype=torch.bfloat16)
    assert cpu._as_fast(q, backward=True)[0].dtype == (torch.bfloat16 if has else torch.float32)
    assert cpu._as_fast(q, backward=False)[0].dtype == torch.bfloat16
