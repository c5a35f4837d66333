"""Twins (AscendC kernels compiled for the CPU) compute the right results and report mistakes."""

import pathlib
import re
import struct

import pytest
import torch
from npu_ops_emulator import EmulatorError, headers, twins

KERNELS = pathlib.Path(__file__).parent / "kernels"
pytestmark = [
    pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not())),
    pytest.mark.xdist_group("twin"),  # shares one library
]

BLOCKS, COUNT = 2, 1024

# The expected finding for each mistake in doubling.cpp: the check, and part of its text.
MISTAKES = {
    "kBuffersTooLarge": ("vendor-check", "limits is 196608"),
    "kUnaligned": ("vendor-check", "must align with 32 bytes"),
    "kNeverFreed": ("vendor-check", ""),
    "kInputNotQueued": ("race", "nothing orders it after the write"),
    "kOutputNotQueued": ("race", "nothing orders it after the write"),
    "kReadsPastTensor": ("gm-bounds", "in no tensor"),
    "kWritesPastTensor": ("gm-bounds", "in no tensor"),
    "kCopyNotWholeBlocks": ("vendor-check", ""),
    "kCountPastBuffer": ("vendor-check", ""),
    "kUsedAfterFree": ("queue", "is freed"),
    "kFreedTwice": ("vendor-check", ""),
    "kReadsUnwritten": ("uninitialised", "nothing has written"),
    "kBlocksOverlap": ("cores-overlap", "block 0 uses the same bytes"),
    "kWaitWithoutSet": ("event", "was not set"),
    "kSetWithoutWait": ("event", "set twice without a wait"),
    "kScalarTooEarly": ("scalar-order", "nothing orders it after the write"),
    "kStoredTooEarly": ("race", "nothing orders it after the write"),
    "kMaskPastBuffer": ("vendor-check", ""),
    "kVectorChain": ("vector-order", "no barrier"),
    "kGatherOutside": ("gm-bounds", "in no tensor"),
}
WARNINGS = ("scalar-order", "vector-order")  # mistakes that bisheng corrects


@pytest.fixture(scope="module")
def twin():
    return twins.compile(KERNELS / "doubling.cpp")


@pytest.mark.slow
def test_names_that_cann_has_beside_its_headers():
    assert twins.compile(KERNELS / "cann_names.cpp").kernels == ("cann_names",)


def launch(twin, mistake, vector_order=False):
    """Run doubling.cpp with a mistake; return findings, result and expected result.

    The twin is told where the tensors are.
    """
    names = re.search(r"enum Mistake.*?\{(.*?)\}", (KERNELS / "doubling.cpp").read_text(), re.S)
    number = [name.strip() for name in names[1].split(",")].index(mistake)
    x = torch.arange(BLOCKS * COUNT, dtype=torch.float32)
    z = torch.full_like(x, torch.nan)
    tensors = {"x": (x.data_ptr(), x.nbytes), "z": (z.data_ptr(), z.nbytes)}
    arguments = struct.pack("<QQii", x.data_ptr(), z.data_ptr(), COUNT, number)
    return twin.launch("doubling", BLOCKS, arguments, tensors, vector_order), z, 2 * x


def test_a_right_kernel_has_no_findings_and_the_right_result(twin):
    findings, z, expected = launch(twin, "kNone", vector_order=True)
    assert findings == []
    assert torch.equal(z, expected)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(twin, mistake):
    check, phrase = MISTAKES[mistake]
    findings, _, _ = launch(twin, mistake, vector_order=mistake == "kVectorChain")
    found = [finding for finding in findings if finding.check == check]
    assert found, "\n".join(map(str, findings)) or "no findings"
    assert any(phrase in finding.what for finding in found), "\n".join(map(str, found))
    for finding in found:
        assert finding.severity == ("warning" if check in WARNINGS else "error")


def test_what_follows_a_scalar_access_comes_after_what_it_waited_for(twin):
    """bisheng makes the scalar pipe wait for the Add, so the next store needs no event."""
    findings, z, expected = launch(twin, "kScalarBetween")
    assert {finding.check for finding in findings} == {"scalar-order"}
    assert torch.equal(z, expected)


def test_a_finding_names_the_block_the_lines_and_both_accesses(twin):
    findings, _, _ = launch(twin, "kStoredTooEarly")
    (finding, *_) = [f for f in findings if f.check == "race"]
    lines = (KERNELS / "doubling.cpp").read_text().splitlines()

    def line_of(access):
        return lines[int(re.search(r"doubling\.cpp:(\d+)", access)[1]) - 1]

    assert finding.block == 0
    assert "MTE3" in finding.access and "DataCopy(z_[tile * kTile], scratch" in line_of(
        finding.access
    )
    assert "pipe V" in finding.other and "Add(scratch, x, x, kTile)" in line_of(finding.other)


def test_other_headers_than_the_pinned_ones_are_refused(tmp_path):
    for name, pin in headers.PINS.items():
        for part in pin.parts:
            (tmp_path / name / part).mkdir(parents=True)
            (tmp_path / name / part / "a.h").write_text("// another version\n")
    with pytest.raises(EmulatorError, match="is not asc-devkit at commit"):
        headers.keep(str(tmp_path))
