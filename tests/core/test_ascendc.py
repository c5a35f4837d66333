"""Where AscendC kernels run, and the sentences on why they do not."""

import pytest
import torch

import npu_ops
from npu_ops.core import ascendc, socs


@pytest.mark.parametrize(
    "soc, family",
    [("Ascend910B3", "ascend910b"), ("Ascend910_9391", "ascend910_93"), ("Ascend950PR_9579", None)],
)
def test_one_build_serves_a_family(soc, family):
    assert socs.ascendc_family(soc) == family


def test_an_object_is_found_or_missed_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(ascendc, "_FOLDER", tmp_path)
    assert ascendc.locate("rope", "ascend910b") == "this installation has no AscendC kernels"
    built = tmp_path / "ascend910_93" / "rope.o"
    built.parent.mkdir()
    built.touch()
    assert ascendc.locate("rope", "ascend910_93") == built
    sentence = ascendc.locate("rope", "ascend910b")
    assert sentence == "its AscendC kernel is built for ascend910_93, this is ascend910b"


def test_tensors_elsewhere_are_told_so():
    x = torch.randn(2, 8)
    rows = {
        r.implementation: r.why_not
        for r in npu_ops.explain("bias_dropout_add", x, None, x, 0.1, True)
    }
    assert rows["ascendc"] == "tensors are on cpu, it runs on npu"
    assert "not on cpu" in ascendc.why_not("bias_dropout_add", x.device)
