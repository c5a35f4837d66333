"""Launches that would fail on an NPU raise an error with a message on the emulated one."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl
from npu_ops_emulator import triton_driver
from triton_worker import call, emulated, new_worker


@triton.jit
def shift(x, out, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at + by, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def pick(x, index, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + tl.load(index + at)))


@triton.jit
def count(total, at):
    tl.atomic_add(total + at, 1)


@contextlib.contextmanager
def bounds_checked():
    triton_driver.install(check_bounds=True)
    try:
        yield
    finally:
        triton_driver.install(check_bounds=False)


@emulated
def test_unified_buffer_overflow():
    x = torch.zeros(1 << 17)
    with pytest.raises(triton_driver.KernelRejected) as error:
        shift[(1,)](x, x, 1 << 17, 0, BLOCK=1 << 17)
    text = str(error.value)
    for word in ("kernel shift", "BLOCK=131072", "192 KiB", "ub overflow", "1572864 bits"):
        assert word in text, text
    triton_driver.install(judge=False)
    try:
        shift[(1,)](x, x, 1 << 17, 0, BLOCK=1 << 17)
    finally:
        triton_driver.install()
    assert x.eq(1).all()


@emulated
def test_grid_limit():
    x = torch.zeros(16)
    for grid in [(65536,), (256, 16, 17), lambda meta: (1 << 20,)]:
        with pytest.raises(triton_driver.GridTooLarge, match="kernel shift: a grid of .* 65535"):
            shift[grid](x, x, 16, 0, BLOCK=16)
    assert not x.any()


@emulated
def test_read_outside_a_tensor():
    x, out = torch.zeros(100), torch.zeros(128)
    with bounds_checked():
        shift[(8,)](x, out, 100, 0, BLOCK=16)
        words = r"kernel shift, program \(6, 0, 0\) of \(8, 1, 1\): reads bytes 384 to 404 of .*'x'"
        with pytest.raises(triton_driver.OutOfBounds, match=words):
            shift[(8,)](x, out, 101, 0, BLOCK=16)
        index = torch.tensor([0, 1, 99, -1], dtype=torch.int64)
        with pytest.raises(triton_driver.OutOfBounds, match="reads bytes -4 to 0 of argument 'x'"):
            pick[(1,)](x, index, out, N=4)
        # The storage is the limit: a view may read past its own end.
        pick[(1,)](x[50:], index, out, N=2)
        index[2] = 49
        pick[(1,)](x[50:], index, out, N=4)


@emulated
def test_write_outside_a_tensor():
    x, memory = torch.zeros(64), torch.zeros(65)
    out = torch.from_numpy(memory.numpy()[:64])  # the storage ends where the tensor ends
    with bounds_checked():
        words = r"program \(3, 0, 0\).* writes bytes 196 to 260 of argument 'out' \(float32\[64\]\)"
        with pytest.raises(triton_driver.OutOfBounds, match=words):
            shift[(4,)](x, out, 64, 1, BLOCK=16)
        assert memory[64] == 0
        with pytest.raises(triton_driver.OutOfBounds, match="kernel count.* writes bytes 8 to 12"):
            count[(1,)](torch.zeros(2, dtype=torch.int32), 2)


@emulated
def test_an_empty_tensor_has_no_memory():
    with bounds_checked(), pytest.raises(triton_driver.OutOfBounds, match=r"float32\[0\]"):
        shift[(1,)](torch.zeros(0), torch.zeros(16), 16, 0, BLOCK=16)


@emulated
def test_the_next_launch_after_a_fault_is_right():
    x, out = torch.arange(64.0), torch.zeros(64)
    with bounds_checked():
        for _ in range(3):
            with pytest.raises(triton_driver.OutOfBounds):
                shift[(4,)](x, out, 64, 32, BLOCK=16)
            shift[(4,)](x, out, 64, 0, BLOCK=16)
            assert out.equal(x + 1)


def compiled_by_a_launch() -> list[str]:
    x, out = torch.zeros(16), torch.zeros(16)
    shift[(1,)](x, out, 16, 0, BLOCK=16)
    assert out.eq(1).all()
    return triton_driver.compiled_kernels()


def test_a_second_process_compiles_nothing(tmp_path):
    made = []
    for _ in range(2):
        with new_worker(tmp_path) as worker:
            made.append(worker.submit(call, __name__, "compiled_by_a_launch").result())
    assert made == [["shift"], []]


def test_processes_that_want_a_kernel_at_once_compile_it_once(tmp_path):
    """Ranks may compile the same kernel at the same time."""
    with new_worker(tmp_path) as one, new_worker(tmp_path) as other:
        made = [worker.submit(call, __name__, "compiled_by_a_launch") for worker in (one, other)]
        assert sorted(m.result() for m in made) == [[], ["shift"]]
