"""Mutants of AscendC kernels change what their rule says, and mutants.py catches them."""

import pathlib
import sys

import mutations
import pytest
from emulated import emulate
from equivalent_mutants import EQUIVALENT
from npu_ops_emulator import headers

pytestmark = pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not()))


def all_mutants() -> list[mutations.Mutant]:
    files = {file for op in mutations.ops() for file in mutations.device_files(op)}
    return [mutant for file in sorted(files) for mutant in mutations.mutants_of(file)]


def test_mutants_change_a_place_each_and_nothing_else():
    for file in {mutant.file for mutant in all_mutants()}:
        text = (headers.kernel_sources() / file).read_text()
        of_file = mutations.mutants_of(file)
        assert all(text[m.start : m.end] == m.old != m.text for m in of_file)
        with_all = mutations.rendered(text, {m: n for n, m in enumerate(of_file)})
        assert with_all.count("\n") == text.count("\n")  # line numbers are unchanged


def test_each_op_has_waits_buffers_and_edges_to_get_wrong():
    for op in mutations.ops():
        rules = {m.rule for file in mutations.device_files(op) for m in mutations.mutants_of(file)}
        assert {"no EnQue", "no FreeTensor", "half a buffer", "a condition forgotten"} <= rules, op


def test_what_is_equivalent_is_still_there():
    there = {(m.file, m.rule, " ".join(m.old.split())) for m in all_mutants()}
    for file, rule, old in EQUIVALENT:
        assert any((file, rule) == m[:2] and old in m[2] for m in there), (file, rule, old)


def assert_caught(*options: str, seconds: int) -> None:
    """Check that mutants.py catches all mutants that equivalent_mutants.py does not explain."""
    script = pathlib.Path(__file__).parent / "mutants.py"
    done = emulate(sys.executable, str(script), *options, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 not" in done.stdout.splitlines()[-1]


SELDOM = pytest.param("causal_conv1d_update", 40, marks=pytest.mark.slow)


@pytest.mark.parametrize("op, sample", [("l2norm", 20), SELDOM])
def test_a_sample_is_caught(op, sample):
    """Only the op's own file: one op does not reach all code of a shared header."""
    assert_caught("--op", op, "--only", f"{op}_ascendc.cpp", "--sample", str(sample), seconds=600)


@pytest.mark.slow
def test_all_are_caught():
    assert_caught(seconds=7200)
