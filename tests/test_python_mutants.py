"""Mutants of an op's Python files change what they say; mutants.py runs them."""

import csv
import pathlib

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


def test_kernels_and_cases_are_left_out():
    for op in ops():
        found = {path.stem for path in python_mutations.files(op)}
        assert not found & {"cases", "triton_ascend", "aclnn"}


def test_the_table_has_a_score_of_95_percent_or_more():
    rows = list(csv.DictReader((pathlib.Path(__file__).parent / "mutants.csv").open()))
    assert rows and {row["op"] for row in rows} <= {*ops()}
    for row in rows:
        assert row["tests"] == "contract" or float(row["percent"]) >= 95, row
