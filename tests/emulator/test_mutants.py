"""Mutants of our AscendC kernels change what they say; mutants.py runs them, by hand."""

import mutations
import pytest
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
        assert with_all.count("\n") == text.count("\n")  # lines are still those of the source


def test_each_op_has_waits_buffers_and_edges_to_get_wrong():
    for op in mutations.ops():
        rules = {m.rule for file in mutations.device_files(op) for m in mutations.mutants_of(file)}
        assert {"no EnQue", "no FreeTensor", "half a buffer", "a condition forgotten"} <= rules, op


def test_what_is_equivalent_is_still_there():
    there = {(m.file, m.rule, " ".join(m.old.split())) for m in all_mutants()}
    for file, rule, old in EQUIVALENT:
        assert any((file, rule) == m[:2] and old in m[2] for m in there), (file, rule, old)
