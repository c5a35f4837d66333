"""torch_npu's norms, activations and dropout against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def close(actual, expected, dtype):
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    torch.manual_seed(0)
    x, gamma = torch.randn(3, 5, 64).to(dtype), torch.randn(64).to(dtype)
    ours = [t.npu().requires_grad_() for t in (x, gamma)]
    theirs = [t.float().requires_grad_() for t in (x, gamma)]
    y, rstd = torch_npu.npu_rms_norm(*ours, 1e-6)
    expected = F.rms_norm(theirs[0], (64,), theirs[1], 1e-6)
    close(y, expected, dtype)
    assert rstd.shape == (3, 5, 1) and rstd.dtype == torch.float32
    y.float().square().sum().backward()
    expected.square().sum().backward()
    close(ours[0].grad, theirs[0].grad, torch.bfloat16 if dtype != torch.float32 else dtype)
    close(ours[1].grad / 30, theirs[1].grad / 30, torch.bfloat16)


def test_rms_norm_is_rejected():
    with pytest.raises(RuntimeError, match=r"(?s)error code is 161002.*gamma: got \[32\]"):
        torch_npu.npu_rms_norm(torch.ones(3, 64).npu(), torch.ones(32).npu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    a, b, gamma = (
        torch.randn(3, 64).to(dtype),
        torch.randn(3, 64).to(dtype),
        torch.ones(64).to(dtype),
    )
    y, _, total = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-6)
    close(total, a.float() + b.float(), dtype)
    close(y, F.rms_norm(a.float() + b.float(), (64,), gamma.float(), 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dtype, dim):
    x = torch.randn(4, 6).to(dtype)
    ours, theirs = x.npu().requires_grad_(), x.float().requires_grad_()
    gate, up = theirs.chunk(2, dim)
    expected = F.silu(gate) * up
    actual = torch_npu.npu_swiglu(ours, dim)
    close(actual, expected, dtype)
    actual.float().sum().backward()
    expected.sum().backward()
    close(ours.grad, theirs.grad, dtype)


def test_dropout_mask_repeats_with_the_seed():
    x = torch.ones(1000, device="npu")
    torch.npu.manual_seed(3)
    first, mask = torch_npu._npu_dropout(x, 0.3)
    torch.npu.manual_seed(3)
    second, _ = torch_npu._npu_dropout(x, 0.3)
    assert torch.equal(first, second)
    assert 620 < (first != 0).sum() < 780
    assert torch.allclose(first[first != 0], torch.tensor(1 / 0.7, device="npu"))
    assert mask.dtype == torch.uint8 and mask.numel() == 128
