"""The time model against measured NPU times; docs/npu-model.md has the same numbers."""

import dataclasses
import json
import subprocess
import sys

import pytest
from npu_ops_tools.model import costs
from npu_ops_tools.model.validation import check, page, stages
from npu_ops_tools.model.validation.cases import candidates, rows


@pytest.mark.slow
def test_the_gates_and_the_page():
    """One test for all, because predicting every row takes a while."""
    points = check.points()
    judged = check.judged(points)
    assert len(judged) >= 48 and not {point.row.op for point in judged} & set(check.FITTED_ON)
    likely = check.score(check.likely(judged))
    assert likely.median <= 0.25 and likely.rank >= 0.95
    ours = check.score(judged)
    for baseline in ("bytes_only", "waves_only"):
        theirs = check.score(judged, baseline)
        assert ours.median < theirs.median and ours.rank > theirs.rank
    products = check.score(check.judged(points, "cube"))
    assert products.count == 5 and products.median <= 0.20
    assert check.score(page.looked_at(points)).rank >= 0.94
    blind = [dataclasses.replace(point, model=point.row.bytes / 1.2e6) for point in judged]
    assert check.score(check.likely(blind)).median > 0.25  # counting bytes alone fails the gate
    for core in ("vector", "cube", "mixed"):
        printed = costs.of("Ascend910B4-1").within(core)
        assert printed == pytest.approx(page.spread(points, core), abs=0.02)
    assert page.text(points) in (page.DOCS / "npu-model.md").read_text(), (
        "write it again: python -m npu_ops_tools.model.validation.page"
    )


def test_the_gate_of_gated_delta_net():
    """Uses rows of benchmarks/model_stages.py; test_stages_are_predicted_so repeats some."""
    held_out = [each for each in stages.predicted(page.STAGES) if each.held_out]
    found = check.score(held_out)
    assert found.count == 32 and found.median <= 0.30 and found.rank >= 0.95
    assert max(abs(each.model / each.us - 1) for each in held_out) < 0.30


@pytest.mark.parametrize("name", ["kkt", "solve_tril", "wy_fast", "chunk_h", "chunk_o"])
def test_stages_are_predicted_so(name):
    """vllm-ascend's released kernels, compiled here, get the stored predictions.

    The kernels' wrappers run in another process, which pretends that there is an NPU.
    """
    kept = [each for each in stages.predicted(page.STAGES) if each.name == name]
    chosen = min(kept, key=lambda each: (each.us, each.chunk))
    sizes = {"tokens": chosen.tokens, "value-heads": chosen.value_heads, "chunk": chosen.chunk}
    options = [f"--{option}={value}" for option, value in {"stage": name, **sizes}.items()]
    command = [sys.executable, "benchmarks/model_stages.py", *options, "--json"]
    done = subprocess.run(command, cwd=page.DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["model"] == pytest.approx(chosen.model, rel=0.01)


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
    """Compiles one kernel per measured operator; the slow test compiles all kernels."""
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
