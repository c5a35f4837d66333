"""torch_npu's mixture-of-experts operators against a loop over tokens and their experts."""

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
    """Route tokens to experts with the arguments that SGLang passes."""
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
@pytest.mark.parametrize("turned", [True, False])
def test_a_weight_for_each_group(dtype, turned):
    """MindSpeed's replacement for Transformer Engine's experts makes this call."""
    x, weight = torch.randn(9, HIDDEN).to(dtype), torch.randn(3, HIDDEN, 4).to(dtype)
    lie = [w.t().contiguous().npu().t() if turned else w.npu() for w in weight]
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], lie, group_list=torch.tensor([2, 0, 7]).npu(), split_item=2, group_type=0,
        group_list_type=1,
    )  # fmt: skip
    close(
        out,
        torch.cat((x[:2].float() @ weight[0].float(), x[2:].float() @ weight[2].float())),
        dtype,
    )
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cumulative", [True, False])
def test_the_gradient_of_weights_for_each_group(dtype, cumulative):
    """group_type 2 splits the summed axis into groups; the result of an empty group is zero."""
    x, grad = torch.randn(9, HIDDEN).to(dtype), torch.randn(9, 4).to(dtype)
    ends = torch.tensor([2, 2, 8])
    groups = ends if cumulative else ends.diff(prepend=torch.tensor([0]))
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu().t()], [grad.npu()], group_list=groups.npu(), split_item=3, group_type=2,
        group_list_type=0 if cumulative else 1,
    )  # fmt: skip
    rows = (slice(0, 2), slice(2, 2), slice(2, 8))
    close(out, torch.stack([x[r].float().T @ grad[r].float() for r in rows]), dtype)
    assert out.dtype == dtype and not out[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [1, CHOSEN])
def test_tokens_to_experts_and_back(dtype, chosen):
    """verl's patches train experts with these calls. Tokens and weights have gradients."""
    torch.manual_seed(0)
    experts = choices()[:, :chosen]
    x, probs = torch.randn(TOKENS, HIDDEN).to(dtype), torch.rand(TOKENS, chosen).to(dtype)
    ours, weights = x.npu().requires_grad_(), probs.npu().requires_grad_()
    rows, where = torch_npu.npu_moe_token_permute(ours, experts.npu())
    order = experts.flatten().argsort(stable=True)
    close(rows.detach(), x[order // chosen].float(), dtype)
    assert where.dtype == torch.int32 and where.cpu().equal(order.argsort().int())
    out = torch_npu.npu_moe_token_unpermute(rows * 2, where, probs=weights)
    theirs, chances = x.float().requires_grad_(), probs.float().requires_grad_()
    right = (theirs[:, None] * 2 * chances[..., None]).sum(1)
    chain = torch.randn(TOKENS, HIDDEN).to(dtype)
    out.backward(chain.npu())
    right.backward(chain.float())
    for actual, expected in ((out, right), (ours.grad, theirs.grad), (weights.grad, chances.grad)):
        torch.testing.assert_close(
            actual.detach().cpu().float(), expected.detach(), atol=8 * CLOSE[dtype],
            rtol=2 * CLOSE[dtype],
        )  # fmt: skip


def test_tokens_of_one_expert_come_back_without_weights():
    experts = torch.tensor([3, 1, 1, 0, 4, 3, 2])
    x = torch.randn(TOKENS, HIDDEN)
    ours = x.npu().requires_grad_()
    out = torch_npu.npu_moe_token_unpermute(*torch_npu.npu_moe_token_permute(ours, experts.npu()))
    out.backward(2 * x.npu())
    assert out.detach().cpu().equal(x) and ours.grad.cpu().equal(2 * x)


def test_tokens_behind_a_number_are_dropped():
    experts, x = choices(), torch.randn(TOKENS, HIDDEN)
    order = experts.flatten().argsort(stable=True)
    rows, where = torch_npu.npu_moe_token_permute(x.npu(), experts.npu(), num_out_tokens=5)
    assert rows.cpu().equal(x[order[:5] // CHOSEN]) and where.shape == (TOKENS * CHOSEN,)
    with pytest.raises(RuntimeError, match="sorted_indices: got Int.14., needs int32 .5."):
        torch_npu.npu_moe_token_unpermute(rows, where, probs=torch.rand(TOKENS, CHOSEN).npu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(dtype):
    """SGLang's whole mixture-of-experts layer: all four operators in sequence."""
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


def matmul(x, weight, groups, **options):
    weights = weight if isinstance(weight, list) else [weight]
    return torch_npu.npu_grouped_matmul(
        [x.npu()], [w.npu() for w in weights],
        **{"group_list": torch.tensor(groups).npu(), "split_item": 2, "group_type": 0}
        | {"group_list_type": 1} | options,
    )  # fmt: skip


def test_groups_that_the_vendor_refuses():
    x, grad = torch.randn(9, HIDDEN), torch.randn(9, 4)
    weight = torch.randn(3, HIDDEN, 4)
    reduced = {"split_item": 3, "group_type": 2}
    with pytest.raises(RuntimeError, match="got 2 and 2 dimensions, needs 2 and 3 with"):
        matmul(x, weight[0], [9])
    with pytest.raises(RuntimeError, match="got a transposed tensor, .* group_type 0"):
        matmul(torch.randn(HIDDEN, 9).npu().t(), weight, [2, 3, 4])
    with pytest.raises(RuntimeError, match="group_list: got 2 groups for 3 weights"):
        matmul(x, weight, [2, 7])
    with pytest.raises(RuntimeError, match="group_list: got 2 groups for 3 weights"):
        matmul(x, list(weight), [2, 7])
    with pytest.raises(RuntimeError, match="needs one last size"):
        matmul(x, [weight[0], weight[1][:, :3]], [2, 7])
    with pytest.raises(RuntimeError, match="some that are transposed"):
        matmul(x, [weight[0], weight[1].t().contiguous().npu().t()], [2, 7])
    with pytest.raises(RuntimeError, match="got 129, needs at most 128"):
        matmul(x, [weight[0]] * 129, [1] * 129)
    with pytest.raises(RuntimeError, match="length of weight must equal x"):
        matmul(x.npu().t(), [grad, grad], [4, 5], **reduced)
    with pytest.raises(RuntimeError, match="group_list: got Int"):
        matmul(x, weight, [], group_list=torch.tensor([2, 3, 4]).int().npu())
    with pytest.raises(RuntimeError, match="got 2 and 3 dimensions, needs 2 and 2 with"):
        matmul(x.npu().t(), torch.randn(1, 9, 4), [9], **reduced)
    with pytest.raises(RuntimeError, match="x: got a tensor that is not transposed"):
        matmul(x.t().contiguous(), grad, [9], **reduced)
    with pytest.raises(RuntimeError, match="weight: got a transposed tensor"):
        matmul(x.npu().t(), grad.t().contiguous().npu().t(), [9], **reduced)


def test_permutations_that_the_vendor_refuses():
    x, experts = torch.randn(TOKENS, HIDDEN).npu(), choices().npu()
    permute, unpermute = torch_npu.npu_moe_token_permute, torch_npu.npu_moe_token_unpermute
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*indices: got Float"):
        permute(x, experts.float())
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*tokens: got Int"):
        permute(x.int(), experts)
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*padded_mode: got True"):
        permute(x, experts, padded_mode=True)
    with pytest.raises(RuntimeError, match="indices: got 513 for each token"):
        permute(x, torch.zeros(TOKENS, 513).int().npu())
    rows, where = permute(x, experts)
    with pytest.raises(RuntimeError, match="sorted_indices: got Long"):
        unpermute(rows, where.long(), probs=torch.rand(TOKENS, CHOSEN).npu())
    with pytest.raises(RuntimeError, match="probs: got 7 for 14 rows"):
        unpermute(rows, where, probs=torch.rand(TOKENS, 1).npu())
