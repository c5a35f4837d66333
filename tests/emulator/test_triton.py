"""Triton kernels on the emulated NPU compute what torch computes, feature by feature."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl
from npu_ops_emulator import triton_driver, triton_lowering
from triton.language.extra.ascend import libdevice
from triton_worker import emulated

with contextlib.suppress(ImportError):  # only the worker process has the driver
    from triton.language.extra.cann.extension import extract_slice, get_element, insert_slice

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def close(actual, expected, tolerance=None):
    tolerance = tolerance or TOLERANCE.get(actual.dtype, 0)
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def unset(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


@triton.jit
def pointwise(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=float("nan"))
    b = tl.load(y + at, mask=at < n)
    wide = tl.where(a > b, a.to(tl.float32) * 2, b - a)
    tl.store(out + at, (wide + a * b).to(out.dtype.element_ty), mask=at < n)


@dtypes
@emulated
def test_pointwise_with_mask(dtype):
    x, y = torch.randn(2, 1000, dtype=dtype)
    out = unset(1024, dtype=dtype)
    pointwise[(triton.cdiv(1000, 128),)](x, y, out, 1000, BLOCK=128)
    expected = torch.where(x > y, x.float() * 2, (y - x).float()) + x * y
    close(out[:1000], expected)
    assert out[1000:].isnan().all()


@triton.jit
def mathematics(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    tl.store(out + at, tl.exp(v))
    tl.store(out + N + at, tl.exp2(v))
    tl.store(out + 2 * N + at, tl.log(v))
    tl.store(out + 3 * N + at, tl.log2(v))
    tl.store(out + 4 * N + at, tl.sqrt(v))
    tl.store(out + 5 * N + at, tl.rsqrt(v))
    tl.store(out + 6 * N + at, tl.sin(v))
    tl.store(out + 7 * N + at, tl.cos(v))
    tl.store(out + 8 * N + at, tl.sigmoid(v))
    tl.store(out + 9 * N + at, tl.erf(v))
    tl.store(out + 10 * N + at, tl.floor(v))
    tl.store(out + 11 * N + at, tl.ceil(v))
    tl.store(out + 12 * N + at, tl.abs(v))
    tl.store(out + 13 * N + at, tl.fma(v, v, v))
    tl.store(out + 14 * N + at, tl.maximum(v, 0.5))
    tl.store(out + 15 * N + at, tl.minimum(v, 0.5))
    tl.store(out + 16 * N + at, tl.where(v != v, 7.0, v))
    tl.store(out + 17 * N + at, tl.math.tanh(v))


@emulated
def test_math():
    x = torch.randn(64) * 3
    x[3], x[4], x[5] = float("nan"), float("inf"), -float("inf")
    out = unset(18, 64)
    mathematics[(1,)](x, out, N=64)
    functions = [
        torch.exp, torch.exp2, torch.log, torch.log2, torch.sqrt, torch.rsqrt, torch.sin, torch.cos,
        torch.sigmoid, torch.erf, torch.floor, torch.ceil, torch.abs, lambda v: v * v + v,
        lambda v: torch.fmax(v, torch.tensor(0.5)), lambda v: torch.fmin(v, torch.tensor(0.5)),
        lambda v: v.nan_to_num(7.0, torch.inf, -torch.inf), torch.tanh,
    ]  # fmt: skip
    for row, function in zip(out, functions, strict=True):
        close(row, function(x))


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    a_tile = tl.make_block_ptr(a, (M, K), (K, 1), (row, 0), (BM, BK), (1, 0))
    b_tile = tl.make_block_ptr(b, (N, K), (K, 1), (column, 0), (BN, BK), (1, 0))
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        left = tl.load(a_tile, boundary_check=(0, 1), padding_option="zero")
        right = tl.load(b_tile, boundary_check=(0, 1), padding_option="zero")
        total += tl.dot(left, tl.trans(right))
        a_tile = tl.advance(a_tile, (0, BK))
        b_tile = tl.advance(b_tile, (0, BK))
    c_tile = tl.make_block_ptr(c, (M, N), (N, 1), (row, column), (BM, BN), (1, 0))
    tl.store(c_tile, total.to(c.dtype.element_ty), boundary_check=(0, 1))


@dtypes
@emulated
def test_dot_and_block_pointers(dtype):
    a, b = torch.randn(50, 70).to(dtype), torch.randn(45, 70).to(dtype)
    c = unset(50, 45, dtype=dtype)
    matmul[(2, 2)](a, b, c, 50, 45, 70, BM=32, BN=32, BK=32)
    close(c, a.double() @ b.double().T, 2e-2 if dtype != torch.float32 else 1e-4)


@triton.jit
def reductions(x, sums, tops, places, scans, R: tl.constexpr, C: tl.constexpr):
    row, column = tl.arange(0, R), tl.arange(0, C)
    at = row[:, None] * C + column[None, :]
    v = tl.load(x + at).to(tl.float32)
    tl.store(sums + row, tl.sum(v, 1))
    tl.store(sums + R + column, tl.sum(v, 0))
    tl.store(tops + row, tl.max(v, 1))
    tl.store(tops + R + column, tl.min(v, 0))
    tl.store(places + row, tl.argmax(v, 1))
    tl.store(places + R + row, tl.argmin(v, 1))
    tl.store(places + 2 * R, tl.argmax(tl.sum(v, 1), 0))
    tl.debug_barrier()
    tl.store(scans + at, tl.cumsum(v, 0))
    tl.store(scans + R * C + at, tl.cumsum(v, 1))
    tl.store(scans + 2 * R * C + at, tl.cumsum(v, 1, reverse=True))
    tl.store(scans + 3 * R * C + at, tl.cumprod(v, 0))
    tl.store(scans + 4 * R * C + row, tl.cumsum(tl.sum(v, 1), 0))


@dtypes
@emulated
def test_reductions_and_scans(dtype):
    rows, columns = 8, 32
    x = torch.randn(rows, columns).to(dtype)
    sums, tops = unset(rows + columns), unset(rows + columns)
    places, scans = torch.full((2 * rows + 1,), -1, dtype=torch.int32), unset(5, rows, columns)
    reductions[(1,)](x, sums, tops, places, scans, R=rows, C=columns)
    x = x.float()
    close(sums, torch.cat([x.sum(1), x.sum(0)]))
    close(tops, torch.cat([x.amax(1), x.amin(0)]))
    close(places, torch.cat([x.argmax(1), x.argmin(1), x.sum(1).argmax()[None]]))
    close(scans[0], x.cumsum(0))
    close(scans[1], x.cumsum(1))
    close(scans[2], x.flip(1).cumsum(1).flip(1))
    close(scans[3], x.cumprod(0))
    close(scans[4, 0, :rows], x.sum(1).cumsum(0))


@triton.jit
def gather(table, index, index64, out, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    at, lane = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    i = tl.load(index + at, mask=at < n, other=0)
    j = tl.load(index64 + at, mask=at < n, other=0)
    rows = tl.load(table + i[:, None] * WIDTH + lane[None, :], mask=(at < n)[:, None], other=-1.0)
    tl.store(out + j[:, None] * WIDTH + lane[None, :], rows, mask=(at < n)[:, None])


@dtypes
@emulated
def test_gather_and_scatter(dtype):
    table, index = torch.randn(40, 16).to(dtype), torch.randint(0, 40, (30,), dtype=torch.int32)
    to, out = torch.randperm(30), unset(32, 16, dtype=dtype)
    gather[(1,)](table, index, to, out, 30, BLOCK=32, WIDTH=16)
    close(out[to], table[index])
    assert out[30:].isnan().all()


@triton.jit
def copy_blocks(out, x, index, count, stride, D: tl.constexpr, N: tl.constexpr):
    """The compiler moves these elements one at a time."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        row, at = tl.load(index + i).to(tl.int64), tl.arange(0, N)
        rest = at % (D * D)
        place = row * N + at // (D * D) * stride + rest // D * D + rest % D
        value = tl.load(x + place, mask=row >= 0, other=0.0)
        tl.store(out + place, value, mask=row >= 0)


@dtypes
@emulated
def test_elements_one_at_a_time(dtype):
    x, out = torch.randn(4, 64).to(dtype), torch.zeros(4, 64, dtype=dtype)
    copy_blocks[(3,)](out, x, torch.tensor([2, -1, 0], dtype=torch.int32), 3, 16, D=4, N=64)
    close(out, x * torch.tensor([[1], [0], [1], [0]]))


@triton.jit
def shapes(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    first, second = tl.split(tl.reshape(v, (N // 2, 2)))
    tl.store(out + at, tl.reshape(tl.join(second, first), (N,)))
    tl.store(out + N + at, tl.interleave(first, second))
    tl.store(out + 2 * N + at, tl.reshape(tl.trans(tl.reshape(v, (4, N // 4))), (N,)))
    tl.store(out + 3 * N + at, tl.broadcast_to(tl.sum(v, 0), (N,)))


@triton.jit
def slices(x, out):
    row, column = tl.arange(0, 8), tl.arange(0, 16)
    v = tl.load(x + row[:, None] * 16 + column[None, :])
    part = extract_slice(v, (2, 4), (4, 8), (1, 1))
    v = insert_slice(v, part * 2, (4, 8), (4, 8), (1, 1))
    tl.store(out + row[:, None] * 16 + column[None, :], v)
    tl.store(out + 128, get_element(v, (1, 2)))


@emulated
def test_shape_functions():
    x, out = torch.randn(64), unset(4, 64)
    shapes[(1,)](x, out, N=64)
    pairs = x.view(32, 2)
    close(out[0], pairs.flip(1).reshape(-1))
    close(out[1], x)
    close(out[2], x.view(4, 16).T.reshape(-1))
    close(out[3], x.sum().expand(64))

    x, out = torch.randn(8, 16), unset(129)
    slices[(1,)](x, out)
    expected = x.clone()
    expected[4:8, 8:16] = x[2:6, 4:12] * 2
    close(out[:128].view(8, 16), expected)
    close(out[128], x[1, 2])


@triton.jit
def compose(scale, offset, next_scale, next_offset):
    return scale * next_scale, offset * next_scale + next_offset


@triton.jit
def whole_tensors(x, index, out, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    v = tl.load(x + at)
    tl.store(out + at, tl.sort(v))
    tl.store(out + R * C + at, tl.sort(v, descending=True))
    tl.store(out + 2 * R * C + at, tl.flip(v, 1))
    tl.store(out + 3 * R * C + at, tl.gather(v, tl.load(index + at), 1))
    _, last = tl.associative_scan((v, v), 1, compose)
    tl.store(out + 4 * R * C + at, last)


@emulated
def test_sort_flip_gather_and_associative_scan():
    x, index = torch.randn(4, 16), torch.randint(0, 16, (4, 16), dtype=torch.int32)
    x[0, 3] = x[0, 7]
    x[1, 5] = float("nan")
    out = unset(5, 4, 16)
    whole_tensors[(1,)](x, index, out, R=4, C=16)
    close(out[0], x.sort().values)
    close(out[1], x.sort(descending=True).values)
    close(out[2], x.flip(1))
    close(out[3], x.gather(1, index.long()))
    state, states = torch.zeros(4), []
    for column in x.T:
        state = state * column + column
        states.append(state)
    close(out[4], torch.stack(states, 1), 1e-4)


@triton.jit
def device_functions(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    tl.store(out + at, libdevice.tanh(v))
    tl.store(out + N + at, libdevice.pow(libdevice.relu(v), v))
    tl.store(out + 2 * N + at, tl.where(libdevice.isnan(v), 1.0, 0.0))
    tl.store(out + 3 * N + at, tl.where(libdevice.isinf(v), 1.0, 0.0))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))  # the vendor has no bf16 tanh
@emulated
def test_device_functions(dtype):
    x, out = torch.randn(32).to(dtype), unset(4, 32, dtype=dtype)
    x[3], x[4] = float("nan"), float("inf")
    device_functions[(1,)](x, out, N=32)
    x = x.float()
    for row, expected in zip(out, (x.tanh(), x.relu() ** x, x.isnan(), x.isinf()), strict=True):
        close(row, expected.float())


@triton.jit
def integers(a8, a16, a32, a64, flags, out32, out64, N: tl.constexpr):
    at = tl.arange(0, N)
    small, middle = tl.load(a8 + at).to(tl.int32), tl.load(a16 + at).to(tl.int32)
    v, wide = tl.load(a32 + at), tl.load(a64 + at)
    tl.store(out32 + at, small + middle)
    tl.store(out32 + N + at, (v >> 3) ^ (v & 255) | (v << 2))
    tl.store(out32 + 2 * N + at, v // 7 + v % 7)
    tl.store(out32 + 3 * N + at, tl.load(flags + at).to(tl.int32))
    # Both operands are below 2**31: triton-ascend 3.2.0 compiles this as a signed product.
    tl.store(out32 + 4 * N + at, tl.umulhi((v & 127).to(tl.uint32), 0x52511F53).to(tl.int32))
    tl.store(out64 + at, wide * 3 + v)
    tl.store(a8 + at, (small + 1).to(tl.int8))
    tl.store(flags + at, wide > 0)


@emulated
def test_integers():
    def draw(dtype):
        return torch.randint(-100, 100, (32,), dtype=dtype)

    a8, a16, a32, a64 = map(draw, (torch.int8, torch.int16, torch.int32, torch.int64))
    a64 *= 1 << 40
    flags, before = a32 > 0, a8.clone()
    seen = flags.clone()
    out32, out64 = torch.zeros(5, 32, dtype=torch.int32), torch.zeros(32, dtype=torch.int64)
    integers[(1,)](a8, a16, a32, a64, flags, out32, out64, N=32)
    close(out32[0], before + a16.int())
    close(out32[1], (a32 >> 3) ^ (a32 & 255) | (a32 << 2))
    close(out32[2], torch.div(a32, 7, rounding_mode="trunc") + torch.fmod(a32, 7))
    close(out32[3], seen)
    close(out32[4], (a32.long() & 127) * 0x52511F53 >> 32)
    close(out64, a64 * 3 + a32)
    close(a8, before + 1)
    assert flags.equal(a64 > 0)


@triton.jit
def arguments(x, bias, out, flag, big, one, scale, steps, WITH: tl.constexpr, N: tl.constexpr):
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    at = (program + tl.program_id(0)) * N + tl.arange(0, N)
    v = tl.load(x + at)
    if bias is not None:
        v += tl.load(bias + at)
    if flag:
        v = v * scale
    if WITH:
        v += one
    v += (big >> 40).to(tl.float32)
    count = steps
    while count > 0:
        if count % 2 == 1:
            v += count
        count -= 1
    for i in range(0, steps, 2):
        v -= i
    tl.store(out + at, v)


@emulated
def test_arguments_grids_and_loops():
    shape = (2, 3, 4, 16)
    x, bias = torch.randn(shape), torch.randn(shape)
    for flag, extra, big in [(True, None, 1 << 41), (False, bias, -(1 << 42))]:
        out = unset(*shape)
        arguments[(4, 3, 2)](x, extra, out, flag, big, 1, 0.5, 5, WITH=flag, N=16)
        expected = x * 0.5 + 1 if flag else x + bias
        close(out, expected + (big >> 40) + (5 + 3 + 1) - (0 + 2 + 4))


@triton.jit
def branches(x, out, places, starts, n, R: tl.constexpr):
    for i in range(tl.program_id(0), 3, tl.num_programs(0)):
        # The sequence and the tile in it are int64 in memory.
        place = i * 2
        sequence = tl.load(places + place).to(tl.int32)
        tile = tl.load(places + place + 1).to(tl.int32)
        start = tl.load(starts + sequence) + tile.to(tl.int64) * R
        at = start + tl.arange(0, R)
        if start + R > n.to(tl.int64):
            value = tl.load(x + at, mask=at < n, other=0.0)
        else:
            value = tl.load(x + at)
        tl.store(out + at, tl.exp(value.to(tl.float32)), mask=at < n)


@emulated
def test_branches_on_what_was_loaded():
    x, out = torch.randn(40, dtype=torch.bfloat16), unset(48)
    places, starts = torch.tensor([[0, 0], [0, 1], [1, 0]]), torch.tensor([0, 32])
    branches[(2,)](x, out, places, starts, 40, R=16)
    close(out[:40], x.float().exp())
    assert out[40:].isnan().all()


@triton.jit
def atomics(x, sums, top, ticket, mine, first, last, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * BLOCK + at)
    tl.atomic_add(sums + at, v, mask=at < n)
    tl.atomic_max(top + at, v)
    tl.store(mine + tl.program_id(0), tl.atomic_add(ticket, 1))
    tl.atomic_cas(first, -1, tl.program_id(0))
    tl.atomic_xchg(last, tl.program_id(0))


@emulated
def test_atomics():
    programs, block = 40, 32
    x = torch.randn(programs, block)
    sums, top = torch.zeros(block), torch.full((block,), -torch.inf)
    ticket, mine = torch.zeros(1, dtype=torch.int32), torch.zeros(programs, dtype=torch.int32)
    first, last = torch.full((1,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    atomics[(programs,)](x, sums, top, ticket, mine, first, last, 20, BLOCK=block)
    close(sums[:20], x.sum(0)[:20])
    assert not sums[20:].any()
    close(top, x.amax(0))
    assert ticket == programs and sorted(mine.tolist()) == list(range(programs))
    assert 0 <= first < programs and 0 <= last < programs


@triton.jit
def exponential(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.exp(tl.load(x + at, mask=at < n)), mask=at < n)


@emulated
def test_autotune_skips_what_does_not_fit():
    # Called here, because a decorator would need the driver, which only the worker has.
    configs = [triton.Config({"BLOCK": 1 << 17}), triton.Config({"BLOCK": 256})]
    tuned = triton.autotune(configs, key=["n"])(exponential)
    x, out = torch.randn(1000), unset(1000)
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000)
    assert tuned.best_config.kwargs == {"BLOCK": 256}
    close(out, x.exp())


@emulated
def test_launch_options_reach_the_compiler():
    target = triton_lowering.Target("Ascend910B3")
    options = {
        "multibuffer": False,
        "unit_flag": True,
        "tile_mix_cube_loop": 2,
        "sync_solver": None,
    }
    flags = triton_lowering.compiler_flags(options, target)
    assert flags[:4] == [
        "--target=Ascend910B3",
        "--enable-auto-multi-buffer=false",
        "--enable-hivm-unit-flag-sync=true",
        "--tile-mix-cube-loop=2",
    ]
    a, b, c = torch.randn(32, 32), torch.randn(32, 32), unset(32, 32)
    matmul[(1, 1)](
        a, b, c, 32, 32, 32, BM=32, BN=32, BK=32,
        multibuffer=False, unit_flag=True, set_workspace_multibuffer=2, tile_mix_vector_loop=2,
        tile_mix_cube_loop=2, limit_auto_multi_buffer_only_for_local_buffer=True,
        enable_ubuf_saving=True,
    )  # fmt: skip
    close(c, a @ b.T, 1e-4)


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@emulated
def test_bytes_moved_are_counted():
    triton_driver.reset_statistics()
    for dtype in (torch.bfloat16, torch.float32):
        x, out = torch.randn(5000).to(dtype), unset(5000, dtype=dtype)
        copy[(triton.cdiv(5000, 256),)](x, out, 5000, BLOCK=256)
        assert out.equal(x)
    seen = triton_driver.statistics()["copy"]
    assert (seen.launches, seen.programs) == (2, 40)
    assert seen.bytes_loaded == seen.bytes_stored == 5000 * (2 + 4)
    assert seen.arguments == {"x": (30000, 0), "out": (0, 30000)}


@pytest.mark.parametrize("soc", ("Ascend910_9391", "Ascend950"))
@emulated
def test_other_chips(soc):
    triton_driver.install(soc=soc, vector_cores=64)
    try:
        assert triton.runtime.driver.active.utils.get_aivector_core_num() == 64
        assert triton.runtime.driver.active.get_current_target().arch == soc
        a, b, c = torch.randn(32, 32), torch.randn(32, 32), unset(32, 32)
        matmul[(1, 1)](a, b, c, 32, 32, 32, BM=32, BN=32, BK=32)
        close(c, a @ b.T, 1e-4)
    finally:
        triton_driver.install()


@emulated
def test_threads_do_not_change_results():
    x = torch.randn(3000, 256)
    reference = None
    for _ in range(3):
        out = unset(3000 * 256)
        pointwise[(3000,)](x, x.flip(0), out, 3000 * 256, BLOCK=256)
        assert reference is None or out.equal(reference)
        reference = out


@emulated
def test_an_empty_grid_launches_nothing():
    triton_driver.reset_statistics()
    out = unset(16)
    copy[(0,)](out, out, 16, BLOCK=256)
    copy[lambda meta: (0, 5)](out, out, 16, BLOCK=256)
    assert out.isnan().all() and not triton_driver.statistics()
