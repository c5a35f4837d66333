"""Mutants of Python files change what their rule says; mutants.py runs them."""

import csv
import pathlib
import types

import mutants
import pytest
import python_mutations
from npu_ops_tools.where import ops


@pytest.mark.parametrize("op", ["l2norm", "gdn_gate"])
def test_each_mutant_is_another_module(op):
    for path in python_mutations.files(op):
        right = compile(path.read_text(), str(path), "exec", dont_inherit=True)
        for mutant in python_mutations.mutants_of(path):
            assert mutant.code() != right, mutant


def test_a_function_gets_the_code_of_its_mutant():
    (path,) = (p for p in python_mutations.files("l2norm") if p.stem == "reference")
    named = {m.rule: m for m in python_mutations.mutants_of(path)}
    changed = mutants.changed_codes(named["keepdim not passed"])
    assert {name for _, name, *_ in changed} == {"reciprocal_norm"}


@pytest.mark.parametrize(
    "right, wrong, changed",
    [
        ("x = 1", "x = 2", None),
        ("class A:\n  x = 1", "class A:\n  x = 2", None),
        ("class A:\n  def f(self): return 1", "class A:\n  def f(self): return 2", {"A.f"}),
        ("def f(): return (x + 1 for x in y)", "def f(): return (x + 2 for x in y)",
         {"f", "f.<locals>.<genexpr>"}),
    ],
)  # fmt: skip
def test_what_a_mutant_changes(tmp_path, right, wrong, changed):
    """`changed`: functions that change, with those nested in them; None: code run at import."""
    path = tmp_path / "module.py"
    path.write_text(right)
    code = compile(wrong, str(path), "exec")
    found = mutants.changed_codes(types.SimpleNamespace(path=path, code=lambda: code))
    assert changed == (None if found is None else {name for _, name, *_ in found})


def test_kernels_and_cases_are_left_out():
    for op in ops():
        found = {path.stem for path in python_mutations.files(op)}
        assert not found & {"cases", "triton_ascend", "aclnn"}


def test_the_table_has_a_score_of_95_percent_or_more():
    rows = list(csv.DictReader((pathlib.Path(__file__).parent / "mutants.csv").open()))
    assert rows and {row["op"] for row in rows} <= {*ops()}
    for row in rows:
        assert row["tests"] == "contract" or float(row["percent"]) >= 95, row
