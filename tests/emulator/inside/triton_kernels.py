"""Triton kernels on NPU tensors: order with queued work, bytes copied, and errors at launch.

Run with --check-bounds.
"""

import pytest
import torch
import triton
import triton.language as tl
from npu_ops_emulator import triton_driver


@triton.jit
def add_one(x, out, n, at, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i + at, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def launch(x, out, at=0, block=256):
    n = x.numel()
    add_one[(triton.cdiv(n, block),)](x, out, n, at, BLOCK=block)


def test_follows_what_the_device_has_queued():
    x = torch.zeros(1000, device="npu")
    for _ in range(5):
        x += 1
        launch(x, x)
        x *= 2
        assert x[0] == x[-1]
    assert x.eq(sum(2 * 2**i for i in range(1, 6))).all()


def test_bytes_moved_are_counted():
    triton_driver.reset_statistics()
    x, out = torch.randn(1000, device="npu"), torch.empty(1000, device="npu")
    launch(x, out)
    seen = triton_driver.statistics()["add_one"]
    assert seen.arguments == {"x": (4000, 0), "out": (0, 4000)}


def test_a_write_outside_is_not_made():
    memory = torch.zeros(2048, device="npu")
    x, out = memory[:512].clone(), memory[512:1024].clone()
    before = out.clone()
    with pytest.raises(triton_driver.OutOfBounds, match="kernel add_one.*writes.*argument 'out'"):
        launch(x, out, at=300)
    launch(x, out)
    assert out.eq(before + 1).all() and not memory.any()


def test_what_does_not_fit_on_chip_is_refused():
    x = torch.zeros(1 << 17, device="npu")
    with pytest.raises(triton_driver.KernelRejected, match="ub overflow"):
        launch(x, x, block=1 << 17)
    assert not x.any()


def test_host_memory_is_out_of_reach():
    with pytest.raises(ValueError, match="argument 'x' is on cpu, the launch on npu:0"):
        launch(torch.zeros(16), torch.zeros(16, device="npu"))


def test_grid_limit():
    x = torch.zeros(65536 * 2, device="npu")
    with pytest.raises(triton_driver.GridTooLarge, match="kernel add_one: a grid of 65536"):
        launch(x, x, block=2)
    assert not x.any()


def test_second_device():
    x = torch.zeros(100, device="npu:1")
    with pytest.raises(ValueError, match="argument 'x' is on npu:1, the launch on npu:0"):
        launch(x, x)
    with torch.npu.device(1):
        launch(x, x)
    assert x.device.index == 1 and x.eq(1).all()
