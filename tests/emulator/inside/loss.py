"""torch_npu's cross entropy against torch's on the CPU, and the calls that the vendor refuses."""

import re

import pytest
import torch
import torch.nn.functional as F
import torch_npu

ROWS, CLASSES = 6, 11
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
REDUCTIONS = ["none", "mean", "sum"]


def logits(dtype=torch.float32):
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(3)).to(dtype)


def labels(dtype=torch.int64):
    return torch.tensor([0, 10, 3, 3, 7, 1], dtype=dtype)


def refused(message, code=161002):
    return pytest.raises(RuntimeError, match=rf"(?s)error code is {code}.*{re.escape(message)}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient(dtype, reduction, weighted):
    x = logits(dtype)
    weight = torch.rand(CLASSES) + 0.1 if weighted else None
    ours = x.npu().requires_grad_()
    loss, log_prob, *zloss = torch_npu.npu_cross_entropy_loss(
        ours, labels().npu(), None if weight is None else weight.npu(), reduction=reduction
    )
    assert loss.shape == ((ROWS,) if reduction == "none" else (1,)) and loss.dtype == dtype
    assert [z.numel() for z in zloss] == [0, 0]
    theirs = x.float().requires_grad_()
    right = F.cross_entropy(theirs, labels(), weight, reduction=reduction)
    chain = torch.rand(loss.shape).to(dtype)
    loss.backward(chain.npu())
    right.backward(chain.float().reshape(right.shape))
    found = (loss.reshape(right.shape), right), (ours.grad, theirs.grad)
    for actual, expected in (*found, (log_prob, theirs.detach().log_softmax(-1))):
        torch.testing.assert_close(
            actual.detach().cpu().float(), expected.detach(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_label_is_ignored_and_labels_are_int32(reduction):
    x = logits().npu()
    loss, *_ = torch_npu.npu_cross_entropy_loss(
        x, labels(torch.int32).npu(), reduction=reduction, ignore_index=3
    )
    right = F.cross_entropy(logits(), labels(), reduction=reduction, ignore_index=3)
    torch.testing.assert_close(loss.cpu().reshape(right.shape), right)
    wanted = x.clone().requires_grad_()
    torch_npu.npu_cross_entropy_loss(wanted, labels().npu(), reduction=reduction, ignore_index=3)[
        0
    ].sum().backward()
    assert wanted.grad.cpu().abs().sum(-1).gt(0).tolist() == [n != 3 for n in labels()]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smooth_labels_have_a_loss_and_no_gradient(reduction):
    x = logits().npu().requires_grad_()
    loss, *_ = torch_npu.npu_cross_entropy_loss(
        x, labels().npu(), reduction=reduction, label_smoothing=0.1
    )
    right = F.cross_entropy(logits(), labels(), reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss.detach().cpu().reshape(right.shape), right)
    with refused("label_smoothing: got 0.1, the gradient takes 0 alone", 561002):
        loss.sum().backward()


def test_verl_s_log_probabilities():
    """verl's call: logits of a batch give a log probability per token."""
    x = torch.randn(2, 3, CLASSES)
    wanted = labels().view(2, 3)
    loss, *_ = torch_npu.npu_cross_entropy_loss(
        x.npu().reshape(-1, CLASSES), wanted.npu().reshape(-1), reduction="none"
    )
    right = x.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    torch.testing.assert_close(-loss.cpu().view(2, 3), right)


def test_what_the_vendor_refuses():
    x, wanted = logits().npu(), labels().npu()
    call = torch_npu.npu_cross_entropy_loss
    with refused("input: got Int"):
        call(x.int(), wanted)
    with refused("target: got Float"):
        call(x, wanted.float())
    with refused("weight: got Half"):
        call(x, wanted, torch.ones(CLASSES).half().npu())
    with refused("target: got [5]", 561002):
        call(x, wanted[:5])
    with refused("needs [N, C] with N of 1 to 200000", 561002):
        call(torch.zeros(200001, 1).npu(), torch.zeros(200001).long().npu())
    with refused("reduction: got 'max'", 561002):
        call(x, wanted, reduction="max")
    with refused("ignore_index: got 11, needs less than 11", 561002):
        call(x, wanted, ignore_index=11)
    with refused("label_smoothing: got 2", 561002):
        call(x, wanted, label_smoothing=2.0)
    with refused("return_zloss: got some"):
        call(x, wanted, lse_square_scale_for_zloss=0.1, return_zloss=True)
    loss, *_ = call(x.clone().requires_grad_(), wanted.int())
    with refused("target: got Int, needs int64"):
        loss.sum().backward()
