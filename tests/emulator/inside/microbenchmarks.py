"""The microbenchmarks' kernels compute what they claim; otherwise their times would be wrong."""

import torch
import torch_npu  # noqa: F401
from npu_ops_tools.model.calibration import benchmarks, kernels


def test_copy():
    x = torch.randn(100_000).bfloat16().npu()
    out = torch.zeros_like(x)
    kernels.copy[(4,)](x, out, x.numel(), BLOCK=benchmarks.TILE)
    assert torch.equal(x, out)


def test_bursts():
    x = torch.randn(100, benchmarks.STRIDE).bfloat16().npu()
    out = torch.zeros_like(x)
    kernels.bursts[(3,)](x, out, 100, benchmarks.STRIDE, R=16, W=64)
    assert torch.equal(x[:, :64], out[:, :64]) and not out[:, 64:].any()


def test_add():
    x = torch.randn(4, 512).npu()
    out = torch.zeros_like(x)
    kernels.add[(4,)](x, out, 10, BLOCK=512)
    torch.testing.assert_close(out, 11 * x)


def test_blocks():
    out = torch.ones(5, 64).npu()
    kernels.blocks[(5,)](out, BLOCK=64)
    assert not out.any()


def test_matmul():
    a, b = torch.randn(384, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    out = torch.zeros(384, 128).bfloat16().npu()
    kernels.matmul[(2,)](a.npu(), b.npu(), out, 3, 128, M=128, N=128, BK=64)
    torch.testing.assert_close(out.cpu().float(), a.float() @ b.float(), atol=0.3, rtol=2e-2)
