"""Which AscendC kernels can run on which NPU, and the reasons why others cannot."""

import pytest
import torch

import npu_ops
from npu_ops.core import ascendc, hardware, socs
from npu_ops.ops.causal_conv1d_update import op as convolution
from npu_ops.ops.gated_delta_rule_update import op as delta_rule


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
    assert sentence == "its AscendC kernel is built for ascend910_93, not for ascend910b"


@pytest.mark.parametrize("soc", ["Ascend950PR_9579", "Ascend910_95"])
def test_an_npu_without_a_build_is_told_why(soc, monkeypatch):
    monkeypatch.setattr(hardware, "npu_name", lambda: soc)
    sentence = ascendc.why_not("rope", torch.device("cpu"))
    assert (
        sentence == f"its AscendC kernel was never run with the instructions of {soc}, which differ"
    )


def test_tensors_elsewhere_are_told_so():
    x = torch.randn(2, 8)
    rows = {
        r.implementation: r.why_not
        for r in npu_ops.explain("bias_dropout_add", x, None, x, 0.1, True)
    }
    assert rows["ascendc"] == "tensors are on cpu, it runs on npu"
    assert "not on cpu" in ascendc.why_not("bias_dropout_add", x.device)


def test_as_if_on_an_npu_the_one_that_is_here_is_asked(monkeypatch):
    """`npu-ops doctor` asks about the NPU of this machine, with CPU tensors."""
    asked = []
    monkeypatch.setattr(ascendc, "why_not_built", lambda *of: asked.append(of) or "not built")
    monkeypatch.setattr(hardware, "npu_name", lambda: "Ascend910B4-for-this-test")
    assert ascendc.why_not("l2norm", torch.device("cpu")) == "not built"
    assert asked == [("l2norm", "ascend910b")]


def arguments(op, **given):
    fields = op.forward.Arguments._fields
    return op.forward.Arguments(**dict.fromkeys(fields) | given)


@pytest.mark.parametrize(
    "keys, A_log, sentence",
    [
        (256, torch.zeros(1), None),
        (256, None, "the call passes computed gates, the kernel takes A_log and dt_bias"),
    ],
)
def test_what_decoding_declines(keys, A_log, sentence):
    given = arguments(
        delta_rule, q=torch.empty(1, 1, keys), A_log=A_log, softplus_beta=1.0,
        softplus_threshold=20.0,
    )  # fmt: skip
    assert delta_rule._against_ascendc(given) == sentence


def test_a_convolution_moves_whole_channels_or_columns():
    def said(state):
        given = arguments(convolution, weight=torch.empty(8, 4), conv_state=state)
        return convolution._why_not_ascendc(given)

    state = torch.empty(2, 8, 6)
    assert said(state) is said(state[..., 1:4]) is said(state.mT.contiguous().mT) is None
    assert said(state[..., ::2]) == "neither channels nor columns of conv_state are contiguous"
