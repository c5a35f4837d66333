"""Doctor's sentence about a torch version, and the tables of images in the documents."""

import re
import sys

import pytest
from npu_ops_tools import doctor, support, where

sys.path.insert(0, str(where.ROOT / "packaging"))
import versions  # noqa: E402

TESTED = [
    {"torch": "2.9.0", "torch_npu": "2.9.0.post9", "python": "3.11", "triton": "300 passed"},
    {
        "torch": "2.9.0",
        "torch_npu": "2.9.0.post9",
        "python": "3.12",
        "triton": "2 failed, 9 passed",
    },
    {"torch": "2.15.0", "torch_npu": "", "python": "3.11"},
]


@pytest.fixture
def tested(monkeypatch):
    rows = [dict.fromkeys((*support.STEPS, "commit"), "") | row for row in TESTED]
    monkeypatch.setattr(support, "tested", lambda: rows)


@pytest.mark.parametrize(
    "torch, torch_npu, python, said",
    [
        ("2.9.0", "2.9.0", "3.11", r"tested: .* torch_npu 2.9.0.post9 \(Python 3.11\); used by"),
        ("2.9.0+cpu", None, "3.11", "tested: torch 2.9.0 and "),
        ("2.9.0", "2.9.0", "3.12", "tested: .* Triton, emulated NPU: 2 failed, 9 passed; used by"),
        ("2.9.0", "2.9.0", "3.10", "tested: .* .Python 3.11."),
        ("2.9.1", "2.9.1", "3.11", "should work: it was tested with torch 2.9.0 and"),
        ("2.15.0", "2.15.0", "3.11", r"should work: it was tested with torch 2.15.0 \(Python"),
        ("2.16.0", None, "3.11", "should work: it was tested with torch 2.15.0"),
        ("2.6.0", "2.6.0", "3.11", "not supported: needs torch 2.7 or newer, this is 2.6.0"),
        ("2.9.0", "2.8.0", "3.11", "not supported: torch_npu 2.8.0 is for another"),
        ("2.9.0a0+git1234", None, "3.11", "should work: this torch was built from source; "),
        (None, None, "3.11", "not supported: torch is not installed"),
    ],
)  # fmt: skip
def test_what_doctor_says_of_a_torch(tested, torch, torch_npu, python, said):
    standing = support.standing({"torch": torch, "torch_npu": torch_npu}, python)
    assert re.match(said, standing), standing


def test_before_anything_was_tested(monkeypatch):
    monkeypatch.setattr(support, "tested", lambda: [])
    said = support.standing({"torch": "2.9.0", "torch_npu": None}, "3.11")
    assert said == "should work: no version was tested"


def test_doctor_prints_the_row_of_this_machine():
    assert re.search(
        r"\n  support +(tested|should work|not supported): ", doctor.text(doctor.collect())
    )


def test_the_images_of_a_torch_are_named(tested):
    assert "Relax" in support.standing({"torch": "2.9.0", "torch_npu": "2.9.0"}, "3.11")


@pytest.mark.parametrize("page", ["README", "docs/images"])
@pytest.mark.parametrize("language", ["", ".zh-CN"])
def test_the_tables_are_those_of_the_files(page, language):
    path = where.ROOT / f"{page}{language}.md"
    table = support.short_table() if page.startswith("README") else support.whole_page()
    assert f"<!-- support -->\n{table}<!-- /support -->" in path.read_text()


def test_each_image_has_a_torch_that_is_tried():
    tried = {torch for torch, _, _ in versions.TORCH_NPU}
    assert {image["torch"] for image in support.images()} <= tried


def test_a_row_takes_the_place_of_the_one_before(monkeypatch, tmp_path):
    monkeypatch.setattr(support, "HERE", tmp_path)
    row = dict.fromkeys((*support.KEYS, *support.STEPS, "commit"), "") | TESTED[0]
    (tmp_path / "tested.csv").write_text(",".join(row) + "\n")
    newer = {"torch": "2.13.0", "cpu": "9 passed"}
    for written in (row, row | newer, row | {"cpu": "1 failed, 2 passed"}):
        support.write(written)
    assert [(r["torch"], r["cpu"]) for r in support.tested()] == [
        ("2.9.0", "1 failed, 2 passed"), ("2.13.0", "9 passed"),
    ]  # fmt: skip


def test_a_row_whose_installation_fails_says_so_in_each_step(monkeypatch, tmp_path):
    """Later steps run too, and fail because npu-ops is not installed."""

    def fail(row):
        raise versions.Failed("pip failed")

    monkeypatch.setattr(versions, "HERE", tmp_path)
    monkeypatch.setattr(versions, "make", lambda row: None)
    monkeypatch.setitem(versions.SHORT, "source", fail)
    assert versions.measure(versions.rows()[0], versions.SHORT) == {
        "environment": "ok",
        "source": "pip failed",
        "doctor": "failed: npu-ops is not installed",
        "verify": "failed: npu-ops is not installed",
    }
