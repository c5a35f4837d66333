"""The model against measured silicon: docs/npu-model.md says the same, and how."""

import dataclasses

import pytest
from npu_ops_tools.model import costs
from npu_ops_tools.model.validation import check, page
from npu_ops_tools.model.validation.cases import candidates, rows


def test_the_gate_and_the_page():
    """One test, for walking all rows takes a while."""
    points = check.points()
    judged = check.judged(points)
    ours = check.score(judged)
    assert ours.count >= 48 and not {point.row.op for point in judged} & set(check.FITTED_ON)
    assert ours.median <= 0.30 and ours.rank >= 0.9
    for baseline in ("bytes_only", "waves_only"):
        theirs = check.score(judged, baseline)
        assert ours.median < theirs.median and ours.rank > theirs.rank
    blind = [dataclasses.replace(point, model=point.row.bytes / 1.2e6) for point in judged]
    assert check.score(blind).median > 0.30  # the gate can fail: bytes at the memory's rate do
    printed = costs.of("Ascend910B4-1").range_vector
    assert printed == pytest.approx(page.spread(points), abs=0.02)
    assert page.text(points) in (page.DOCS / "npu-model.md").read_text(), (
        "write it again: python -m npu_ops_tools.model.validation.page"
    )


def test_few_constants_are_fitted():
    assert all(len(names) <= 5 for names in check.CONSTANTS.values())
    assert set(check.CONSTANTS) <= set(costs.families())


def test_every_measured_row_has_a_source_and_a_licence():
    found = list(rows())
    assert len(found) > 130
    for row in found:
        assert row.source and row.time > 0 and row.p10 <= row.time <= row.p90


def test_every_number_says_where_it_is_from():
    for row in costs._rows():
        assert row["source"] or row["name"] == "as", row
        assert row["licence"] == "MulanPSL-2.0" or "msopmodeling" not in row["source"], row


def test_what_is_kept_is_what_the_compiler_makes():
    """One kernel of each kind; the slow test compiles all."""
    kinds = {}
    for row in rows():
        kinds.setdefault(row.op, (candidates(row)[0], row.soc))
    kept = check._compiled()
    for candidate, soc in kinds.values():
        assert check.compile_one(candidate, soc) == kept[check.key(candidate, soc)], candidate


@pytest.mark.slow
def test_all_that_is_kept_is_what_the_compiler_makes():
    assert check.compile_all() == check._compiled()


@pytest.mark.slow
@pytest.mark.parametrize("family", check.CONSTANTS)
def test_the_constants_are_those_of_the_fit(family):
    prices = costs.of(family)
    for name, value in check.fit(family).items():
        assert getattr(prices, name) == pytest.approx(value, rel=0.1), name
