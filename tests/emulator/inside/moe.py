"""Mixtures of experts by torch_npu against a loop over tokens and their experts."""

import pytest
import torch
import torch_npu

TOKENS, HIDDEN, EXPERTS, CHOSEN = 7, 16, 5, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def close(actual, expected, dtype):
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
    )


def choices():
    return torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).int()


def routed(x, experts, **options):
    """As SGLang calls it."""
    return torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), active_num=experts.numel(), expert_num=EXPERTS,
        expert_tokens_num_flag=True, active_expert_range=[0, EXPERTS], quant_mode=-1,
        **{"expert_tokens_num_type": 1} | options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_gating(dtype):
    x = torch.randn(TOKENS, EXPERTS).to(dtype)
    y, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), k=CHOSEN)
    best = x.float().softmax(-1).topk(CHOSEN)
    close(y, best.values, dtype)
    assert experts.cpu().equal(best.indices.int()) and y.dtype == dtype
    assert rows.cpu().equal(torch.arange(TOKENS * CHOSEN).view(CHOSEN, TOKENS).T.int())


def test_equal_chances_go_to_the_first():
    _, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(torch.zeros(3, 8).npu(), k=3)
    assert experts.cpu().tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("cumulative", [True, False])
def test_routing_sorts_tokens_by_their_experts(cumulative):
    x, experts = torch.randn(TOKENS, HIDDEN), choices()
    kind = {"expert_tokens_num_type": 0 if cumulative else 1}
    out, where, tokens, _ = routed(x, experts, **kind)
    order = sorted(range(experts.numel()), key=lambda n: int(experts.flatten()[n]))
    assert out.cpu().equal(x[[n // CHOSEN for n in order]])
    assert [int(n) for n in where.cpu()] == [order.index(n) for n in range(experts.numel())]
    counts = [int((experts == expert).sum()) for expert in range(EXPERTS)]
    total = torch.tensor(counts).cumsum(0).tolist() if cumulative else counts
    assert tokens.cpu().tolist() == total
    _, sources, _, _ = routed(x, experts, row_idx_type=1, **kind)
    assert sources.cpu().tolist() == order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cumulative", [True, False])
def test_a_product_for_each_group(dtype, cumulative):
    x, weight = torch.randn(9, HIDDEN).to(dtype), torch.randn(3, 4, HIDDEN).to(dtype)
    ends = torch.tensor([2, 2, 9])
    groups = ends if cumulative else ends.diff(prepend=torch.tensor([0]))
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu().transpose(1, 2)], group_list=groups.npu(), split_item=2,
        group_type=0, group_list_type=0 if cumulative else 1,
    )  # fmt: skip
    right = torch.cat((x[:2].float() @ weight[0].float().T, x[2:].float() @ weight[2].float().T))
    close(out, right, dtype)
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(dtype):
    """All four, one after the other, as SGLang serves a mixture of experts."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).to(dtype)
    weight = (torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4).to(dtype)
    logits = torch.randn(TOKENS, EXPERTS).to(dtype)
    scales, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits.npu(), k=CHOSEN)
    rows, where, tokens, _ = routed(x, experts.cpu())
    (rows,) = torch_npu.npu_grouped_matmul(
        [rows], [weight.npu()], group_list=tokens, split_item=2, group_type=0, group_list_type=1
    )
    out = torch_npu.npu_moe_finalize_routing(
        rows, None, None, None, scales, where, experts, drop_pad_mode=2
    )
    right = torch.zeros(TOKENS, HIDDEN)
    best = logits.float().softmax(-1).topk(CHOSEN)
    for n in range(TOKENS):
        for chance, expert in zip(best.values[n], best.indices[n], strict=True):
            right[n] += chance * (x[n].float() @ weight[expert].float())
    close(out, right, dtype)


def test_rows_by_columns_with_what_is_added():
    rows, where = torch.randn(6, 4), torch.randperm(6).int()
    skips, bias = torch.randn(2, 3, 4), torch.randn(EXPERTS, 4)
    scales, experts = torch.rand(3, 2), torch.randint(EXPERTS, (3, 2)).int()
    given = [x.npu() for x in (rows, *skips, bias, scales, where, experts)]
    out = torch_npu.npu_moe_finalize_routing(*given, drop_pad_mode=0)
    right = skips.sum(0)
    for n in range(3):
        for k in range(2):
            right[n] += scales[n, k] * (rows[where[k * 3 + n]] + bias[experts[n, k]])
    close(out, right, torch.float32)


def test_what_is_not_emulated_is_rejected():
    x, experts = torch.randn(TOKENS, HIDDEN), choices()
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*drop_pad_mode: got 1"):
        routed(x, experts, drop_pad_mode=1, expert_capacity=3)
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*row_idx_type: got 2"):
        routed(x, experts, row_idx_type=2)
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*finished"):
        torch_npu.npu_moe_gating_top_k_softmax(x.npu(), torch.zeros(7).bool().npu(), k=2)
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*scales: got"):
        torch_npu.npu_moe_finalize_routing(
            x[:6].half().npu(), None, None, None, torch.rand(3, 2).npu(),
            torch.arange(6).int().npu(), experts[:3].npu(), drop_pad_mode=2,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*weight: got Half"):
        torch_npu.npu_grouped_matmul(
            [x.npu()], [torch.ones(2, HIDDEN, 4).half().npu()], split_item=2, group_type=0,
            group_list=torch.tensor([3, 7]).npu(), group_list_type=0,
        )  # fmt: skip
