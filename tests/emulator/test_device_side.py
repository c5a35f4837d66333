"""Mistakes in AscendC kernels that a device does not allow: clang reports them, g++ does not."""

import pathlib
import re

import device_side
import pytest
from npu_ops_emulator import headers
from support import often

pytestmark = pytest.mark.skipif(
    device_side.why_not() is not None, reason=str(device_side.why_not())
)
MISTAKES = pathlib.Path(__file__).parent / "kernels" / "device_mistakes.cpp"

# The expected finding for each mistake in device_mistakes.cpp.
FOUND = {
    "kDouble": "Run.*: double",
    "kStandardLibrary": "std::max.*: has no __aicore__",
    "kMathLibrary": "sinf: a function that is not there",
    "kRecursion": "factorial.*: calls itself",
    "kGlobalForPlain": "no matching function for call to 'plain_sum'",
    "kPlainForGlobal": "no matching function for call to 'global_sum'",
    "kBufferForGlobal": "no matching function for call to 'global_sum'",
    "kDeepStack": "device_mistakes: [34].... bytes of stack",
    "kOfTheHost": "Shared::half.*: has no __aicore__",
    "kUnknownCall": "Run.*: calls what is not known before",
    "kGlobalConstructor": "a global constructor",
    "kCast": "Run.*: takes an address in one memory for one in another",
    "kHeap": "operator new.*: a function that is not there",
}


def number(mistake: str) -> int:
    names = re.search(r"enum Mistake \{(.*?)\}", MISTAKES.read_text(), re.S)[1].split(",")
    return [name.strip() for name in names].index(mistake)


SOURCES = sorted(headers.kernel_sources().glob("*/*_ascendc.cpp"))
# `make test` checks the largest kernel and a small one, `make test-all` all kernels.
KERNELS = often(SOURCES, ("gated_delta_rule_update", "rope"), lambda path: path.parent.name)


@pytest.mark.parametrize("source", KERNELS)
def test_a_device_has_nothing_against_our_kernels(source):
    assert device_side.findings(source) == []


@pytest.mark.parametrize("source", (MISTAKES, MISTAKES.with_name("cann_names.cpp")))
def test_a_right_kernel_has_no_findings(source):
    assert device_side.findings(source) == []


@pytest.mark.parametrize("mistake", FOUND)
def test_mistakes_are_found(mistake):
    found = device_side.findings(MISTAKES, f"-DMISTAKE={number(mistake)}")
    assert any(re.search(FOUND[mistake], finding) for finding in found), found


# Ascend950


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_our_kernels_call_what_ascend950_declares(source):
    assert device_side.of_ascend950(source) == []


def test_a_call_that_ascend950_has_not_is_found(tmp_path):
    source = tmp_path / "kernel.cpp"
    source.write_text(
        "__aicore__ void kernel(AscendC::LocalTensor<float> x) {\n"
        "  AscendC::Add(x, x, x, 64);\n"
        "  AscendC::Add(x, x);\n"
        "}\n"
    )
    (found,) = device_side.of_ascend950(source)
    assert "kernel.cpp:3:3: error: no matching function for call to 'Add'" in found


def test_why_the_twin_does_not_run_them():
    """Ascend910B's Add is an instruction on memory; Ascend950's is a function on registers."""
    of = {name: headers.staged() / "asc-devkit/impl/basic_api" / name
          for name in ("dav_c220", "dav_3510")}  # fmt: skip
    on_memory = (of["dav_c220"] / "kernel_operator_vec_binary_impl.h").read_text()
    on_registers = (of["dav_3510"] / "kernel_operator_vec_binary_continuous_impl.h").read_text()
    assert "vadd(" in on_memory and "RegTensor" not in on_memory
    assert "Reg::LoadAlign(src0Reg, src0" in on_registers and "vadd(" not in on_registers
