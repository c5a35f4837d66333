"""Random numbers: Philox's published values, the same mask by every implementation, statistics."""

import itertools
import math
import pathlib
import subprocess

import numpy as np
import pytest
import torch
from support import forced, implementations, threads

import npu_ops
from npu_ops.core import rng
from npu_ops.ops.bias_dropout_add import op

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter, key, words):
    """Test vectors of philox4x32 with 10 rounds, from Random123's kat_vectors."""
    assert tuple(int(word) for word in rng.philox4x32(counter, key)) == words


def philox(counter, key):
    """Compute Philox4x32-10 with Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def draws(rows, width, seed, offset):
    """Return the 16-bit draw of each element, computed one at a time."""
    lane_width = 16 * math.ceil(math.ceil(width / 8) / 16)
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)

    def draw(row, column):
        lane, j = divmod(column, lane_width)
        words = philox((j, row, offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF), key)
        return words[lane // 2] >> 16 * (lane % 2) & 0xFFFF

    return torch.tensor([[draw(r, c) for c in range(width)] for r in range(rows)])


def kept(rows, width, p, seed, offset, device="cpu"):
    """Return the keep-mask [rows, width] that the operator draws."""
    state = torch.tensor([seed, offset], device=device)
    ones = torch.ones(rows, width, device=device)
    out = torch.ops.npu_ops.bias_dropout_add(
        ones, None, torch.zeros_like(ones), state, p, torch.float32
    )
    return out.cpu() != 0


def kept_in_backward(rows, width, p, seed, offset, device="cpu"):
    state = torch.tensor([seed, offset], device=device)
    ones = torch.ones(rows, width, device=device)
    grad, _ = torch.ops.npu_ops.bias_dropout_add_backward(ones, state, p, torch.float32, False)
    return grad.cpu() != 0


SEEDS = [
    (0, 0),
    (1, 2),
    (2**63 - 1, 2**63 - 2),
    (-1, -1),
    (0x0123456789ABCDEF, 1 << 32),
    (1 << 32, 5),
]


@pytest.mark.parametrize("implementation, device", implementations(op.forward.table))
@pytest.mark.parametrize("mask", [kept, kept_in_backward])
@pytest.mark.parametrize("seed, offset", SEEDS)
def test_mask_is_its_definition(implementation, device, mask, seed, offset):
    expected = draws(3, 275, seed, offset)
    with forced(implementation, "bias_dropout_add", "bias_dropout_add_backward"):
        for p in (0.5, 0.1, 0.97):
            actual = mask(3, 275, p, seed, offset, device)
            assert torch.equal(actual, expected >= round(p * 65536))


@pytest.mark.parametrize("implementation, device", implementations(op.forward.table))
@pytest.mark.parametrize("mask", [kept, kept_in_backward])
@pytest.mark.parametrize(
    "width", [1, 2, 7, 8, 15, 16, 17, 127, 128, 129, 255, 257, 1000, 1025, 4096]
)
@pytest.mark.parametrize("rows", [1, 3, 131])
def test_mask_is_the_references(implementation, device, mask, rows, width):
    state = torch.tensor([width << 33 | rows, rows << 40 | width])
    with forced(implementation, "bias_dropout_add", "bias_dropout_add_backward"):
        actual = mask(rows, width, 0.3, *state.tolist(), device)
    assert torch.equal(actual, rng.keep_mask(rows, width, 0.3, state))


PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "common/philox.h"
using namespace npu_ops;
int main(int, char** given) {
  const int64_t rows = std::atoi(given[1]), width = std::atoi(given[2]), lane = lane_width(width);
  const auto threshold = static_cast<uint16_t>(std::atoi(given[3]));
  const Philox philox(std::strtoull(given[4], nullptr, 10), std::strtoull(given[5], nullptr, 10),
                      lane);
  std::vector<uint16_t> keep(kDrawLanes * lane);
  for (int64_t row = 0; row < rows; ++row) {
    philox.keep_row(row, threshold, keep.data());
    for (int64_t i = 0; i < width; ++i) std::putchar(keep[i] ? keep[i] == 0xffff ? '1' : '?' : '0');
  }
}
"""


@pytest.mark.parametrize("optimisation", ["-O1", "-O3"])
def test_the_native_kernel_draws_the_same_in_scalars_and_in_vectors(optimisation, tmp_path):
    source = tmp_path / "draws.cpp"
    source.write_text(PROGRAM)
    flags = [optimisation, "-std=c++20", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, source, "-o", tmp_path / "draws"], check=True)
    shapes = [(3, 275), (2, 2100), (20, 4096)]
    for (rows, width), (seed, offset) in itertools.product(shapes, SEEDS):
        words = [rows, width, rng.threshold(0.3), seed % 2**64, offset % 2**64]
        run = subprocess.run(
            [tmp_path / "draws", *map(str, words)], capture_output=True, check=True
        )
        expected = rng.keep_mask(rows, width, 0.3, torch.tensor([seed, offset]))
        assert run.stdout.decode() == "".join(map(str, expected.int().flatten().tolist()))


@pytest.mark.parametrize("p", [1e-9, 2**-17, 2**-16, 1 - 2**-16, 1 - 2**-17, 1 - 1e-9])
@pytest.mark.parametrize("implementation, device", implementations(op.forward.table))
def test_extreme_p_is_never_all_or_nothing(implementation, device, p):
    expected = rng.keep_mask(512, 4096, p, torch.tensor([3, 4]))
    with forced(implementation, "bias_dropout_add"):
        assert torch.equal(kept(512, 4096, p, 3, 4, device), expected)
    assert 0 < expected.sum() < expected.numel()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_mask_does_not_depend_on_threads(number):
    with threads(number):
        mask = kept(700, 300, 0.3, 5, 6)
    assert torch.equal(mask, rng.keep_mask(700, 300, 0.3, torch.tensor([5, 6])))


def sigmas(mask, probability):
    """Return the distance of the kept share from `probability`, in standard deviations."""
    n = mask.numel()
    return (mask.sum().item() - n * probability) / math.sqrt(n * probability * (1 - probability))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_keep_rate(p):
    """The kept share of 10^7 draws is within 5 sigma of 1 - p rounded to 16 bits."""
    mask = kept(2500, 4000, p, 11, 13)
    exact = 1 - round(p * 65536) / 65536
    assert abs(exact - (1 - p)) <= 2**-17
    assert abs(sigmas(mask, exact)) < 5


def test_keep_rate_is_even_over_rows_and_columns():
    mask = kept(2048, 2048, 0.5, 17, 19).float()
    for dim in (0, 1):
        # standard normal if draws are independent
        deviations = (mask.mean(dim) - 0.5) * 2 * math.sqrt(2048)
        assert deviations.abs().max() < 5.5
        assert 0.9 < deviations.std() < 1.1


def correlation(a, b):
    """Return the correlation of two masks, in standard deviations for independent masks."""
    a, b = ((x.double() - x.double().mean()).flatten() for x in (a, b))
    return (a @ b / (a.norm() * b.norm())).item() * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shift", [1, 2, 16, 64, 127, 128, 256])
def test_rows_and_columns_are_not_correlated(shift, p):
    mask = kept(1024, 1024, p, 23, 29)
    assert abs(correlation(mask[shift:], mask[:-shift])) < 5
    assert abs(correlation(mask[:, shift:], mask[:, :-shift])) < 5


def test_the_eight_lanes_of_a_call_are_not_correlated():
    lanes = kept(4096, 1024, 0.5, 31, 37).unflatten(1, (8, 128)).unbind(1)
    for a, b in itertools.combinations(lanes, 2):
        assert abs(correlation(a, b)) < 5


@pytest.mark.parametrize("bit", [0, 1, 7, 31, 32, 33, 62])
def test_nearby_seeds_and_offsets_are_not_correlated(bit):
    seed, offset = 0x1234567812345678, 0x0FEDCBA987654321
    masks = [
        kept(512, 1024, 0.5, seed, offset),
        kept(512, 1024, 0.5, seed ^ 1 << bit, offset),
        kept(512, 1024, 0.5, seed, offset ^ 1 << bit),
        kept(512, 1024, 0.5, seed ^ 1 << bit, offset ^ 1 << bit),
    ]
    for a, b in itertools.combinations(masks, 2):
        assert abs(correlation(a, b)) < 5


def test_draws_are_uniform():
    """Chi-square test of each byte of each word, with 256 bins."""
    words = rng.philox4x32((torch.arange(250_000), 1, 2, 3), (4, 5))
    for word, shift in itertools.product(words, (0, 8, 16, 24)):
        counts = np.bincount((word >> shift & 0xFF).numpy(), minlength=256)
        expected = counts.sum() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_state_comes_from_the_default_generator_and_advances_it():
    torch.manual_seed(5)
    first, second = (rng.new_state(torch.device("cpu"), None) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(rng.new_state(torch.device("cpu"), None), first)
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,)


def test_state_from_a_generator_leaves_the_default_one():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw = torch.Generator().manual_seed(5)
    first = rng.new_state(torch.device("cpu"), draw)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, rng.new_state(torch.device("cpu"), draw.manual_seed(5)))


def test_states_of_a_run_do_not_repeat():
    torch.manual_seed(0)
    states = torch.stack([rng.new_state(torch.device("cpu"), None) for _ in range(2000)])
    assert states[:, 0].unique().numel() == states[:, 1].unique().numel() == 2000
    assert (states >= 0).all() and states.max() > 2**62


def test_mask_of_the_public_function_changes_every_call():
    x = torch.ones(64, 64)
    first, second = (npu_ops.bias_dropout_add(x, None, x, 0.5, True) for _ in range(2))
    assert abs(correlation(first > 1, second > 1)) < 5
