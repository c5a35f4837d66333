"""NPU_OPS_CONSISTENT: torch_npu's operators for experts give a token the bits of npu_ops.linear."""

import pytest
import torch
from support import devices

import npu_ops
from npu_ops import consistent
from npu_ops.consistent import experts
from npu_ops.core import env

MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
EXPERTS, TOKENS, CHOSEN, HIDDEN, WIDTH = 6, 23, 3, 64, 48


@pytest.fixture(autouse=True)
def replaced():
    consistent.install()
    with env.override(consistent="tokens"):
        yield
    consistent.remove()


def drawn(device):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=draw)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=draw) / 8
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw) / 8
    chances = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(-1)
    weights, index = chances.topk(CHOSEN)
    tensors = [tensor.to(device, torch.bfloat16) for tensor in (x, gate_up, down, weights)]
    return *tensors, index.to(device)


def alone(x, gate_up, down, weights, index):
    """Compute each token alone: the outputs of its experts, added in the order of expert ids."""
    found = []
    for row, names, own in zip(x, index.tolist(), weights, strict=True):
        parts = []
        for name, weight in sorted(zip(names, own, strict=True), key=lambda pair: pair[0]):
            gate, up = npu_ops.linear(row[None], gate_up[name]).chunk(2, -1)
            part = npu_ops.linear(torch.nn.functional.silu(gate) * up, down[name])
            parts.append(part * weight)
        found.append(torch.stack(parts, 1).sum(1))
    return torch.cat(found)


def test_a_token_s_rows_are_added_in_the_order_of_their_experts():
    """In fp32, 1 is lost beside 2**30 unless it is added last."""
    rows = torch.tensor([[2.0**30], [2.0**29], [1.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, -2.0, 1.0]])
    assert (rows[[2, 0, 1]] * weights[0, [2, 0, 1], None].bfloat16()).sum(0).item() == 0
    for order in ([0, 1, 2], [2, 0, 1]):
        given = torch.tensor([order]), weights[:, order]
        assert experts.weighted_sum(rows, *given).item() == 1


if "npu" in devices():
    on_npu = pytest.mark.parametrize("device", ["npu"])

    def routed(x, index, **options):
        return torch.ops.npu.npu_moe_init_routing_v2(
            x, index.int(), active_num=index.numel(), expert_num=EXPERTS,
            expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[0, EXPERTS], quant_mode=-1, **options,
        )[:3]  # fmt: skip

    def products(rows, gate_up, down, counts, as_list):
        def product(rows, weight):
            weight = weight.transpose(1, 2)
            weight = list(weight) if as_list else [weight]
            return torch.ops.npu.npu_grouped_matmul(
                [rows], weight, split_item=2, group_type=0, group_list_type=1, group_list=counts
            )[0]

        return product(torch.ops.npu.npu_swiglu(product(rows, gate_up)), down)

    def unpermuted(rows, place, weights, index):
        return torch.ops.npu.npu_moe_token_unpermute(rows, place.abs(), probs=weights)

    def finalized(rows, place, weights, index):
        return torch.ops.npu.npu_moe_finalize_routing(
            rows, None, None, None, weights, place, index.int(), drop_pad_mode=2
        )

    @on_npu
    @MODES
    @pytest.mark.parametrize("as_list", [False, True])  # MindSpeed has one matrix per expert
    @pytest.mark.parametrize("sums", [unpermuted, finalized])  # vllm-ascend's, SGLang's
    def test_they_give_a_token_its_own_bits(device, mode, as_list, sums):
        x, gate_up, down, weights, index = drawn(device)
        with mode():
            rows, place, counts = routed(x, index)
            rows = products(rows, gate_up, down, counts.long(), as_list)
            found = sums(rows, place, weights, index)
            assert torch.equal(found, alone(x, gate_up, down, weights, index))

    @on_npu
    def test_gradients_are_of_all_that_was_given(device):
        """torch_npu's weight gradients use group_type 2, which the patch passes on to torch_npu."""
        x, gate_up, *_ = drawn(device)
        ends = torch.tensor([0, 4, 4, 9, 20, 23], device=device)

        def product(x, weight, **named):
            return torch.ops.npu.npu_grouped_matmul(
                [x], [weight], group_list=ends, group_list_type=0, **named
            )[0]

        x.requires_grad_(), gate_up.requires_grad_()
        found = product(x, gate_up.transpose(1, 2), split_item=2, group_type=0)
        grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
        own = torch.autograd.grad(found, (x, gate_up), grad)
        theirs = product(grad.t(), x.detach(), split_item=3, group_type=2)
        torch.testing.assert_close(own[1], theirs, rtol=0.01, atol=0.01)
        assert own[0].abs().sum() > 0

    @on_npu
    def test_a_result_of_another_dtype_is_left_to_torch_npu(device):
        x, gate_up, *_ = drawn(device)
        given = {"group_list": torch.tensor([0, 4, 4, 9, 20, 23], device=device), "group_type": 0}
        given |= {"split_item": 2}

        def product(dtype):
            weight = [gate_up.transpose(1, 2)]
            return torch.ops.npu.npu_grouped_matmul([x], weight, output_dtype=dtype, **given)[0]

        assert torch.equal(product(torch.bfloat16), product(None))
        assert product(torch.float32).dtype is torch.float32

    @on_npu
    def test_a_bias_is_left_to_torch_npu(device):
        x, gate_up, *_ = drawn(device)
        ends = torch.tensor([0, 4, 4, 9, 20, 23], device=device)
        with pytest.raises(RuntimeError, match="bias"):  # the emulated NPU refuses the bias
            torch.ops.npu.npu_grouped_matmul(
                [x], [gate_up.transpose(1, 2)], bias=[gate_up[:, :, 0].float()],
                group_list=ends, split_item=2, group_type=0,
            )  # fmt: skip

    @on_npu
    def test_tokens_that_are_padded_are_refused(device):
        x, _, _, weights, index = drawn(device)
        with pytest.raises(ValueError, match="padded_mode: got True"):
            torch.ops.npu.npu_moe_token_unpermute(x, index.int().flatten(), weights, True)

    @on_npu
    @pytest.mark.parametrize("sums", [unpermuted, finalized])
    def test_the_sum_has_the_dtype_of_its_rows_under_autocast(device, sums):
        """Under autocast, torch's own sum is fp32. verl's FSDP actor computes under autocast."""
        x, _, _, weights, index = drawn(device)
        rows, place, _ = routed(x, index)
        expected = sums(rows, place, weights, index)
        with torch.autocast(device, torch.bfloat16):
            assert rows.sum(1).dtype is torch.float32
            found = sums(rows, place, weights, index)
        assert found.dtype is torch.bfloat16 and torch.equal(found, expected)

    @on_npu
    def test_gradients_of_the_sum(device):
        x, _, _, weights, index = drawn(device)
        rows, place, _ = routed(x, index)
        given = [tensor.float().requires_grad_() for tensor in (rows, weights)]

        def gradients():
            out = torch.ops.npu.npu_moe_token_unpermute(given[0], place.abs(), probs=given[1])
            return torch.autograd.grad(out.square().sum(), given)

        own = gradients()
        consistent.remove()
        for found, expected in zip(own, gradients(), strict=True):
            torch.testing.assert_close(found, expected)
