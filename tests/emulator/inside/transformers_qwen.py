"""transformers' models on NPU tensors, by our kernels only, give the results of the CPU.

Nothing falls back (NPU_OPS_STRICT=1), and shadow mode, which copies every argument, finds no
difference.
"""

import logging
import pathlib
import sys

import npu_ops_adapters
import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parents[2] / "adapters"))

import transformers_models
from npu_ops_adapters.transformers import experts

from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close

OPERATORS = {
    "qwen3_moe": {"rope": 2, "attention": 2, "rms_norm": 9, "grouped_linear": 4, "swiglu": 2},
    "qwen3_vl": {"rope": 4, "attention": 4, "rms_norm": 9, "swiglu": 2},
    "qwen3_5": {"rope": 3, "attention": 3, "causal_conv1d": 1, "chunk_gated_delta_rule": 1,
                "rms_norm_gated": 1, "rms_norm": 7, "swiglu": 2},
    "qwen4_exp": {"rope": 2, "attention": 1, "causal_conv1d": 1, "chunk_gated_delta_rule": 1,
                  "rms_norm_gated": 1, "rms_norm": 59, "grouped_linear": 4, "swiglu": 4},
    "olmo_hybrid": {"rope": 1, "attention": 1, "causal_conv1d": 1, "chunk_gated_delta_rule": 1,
                    "rms_norm_gated": 1, "rms_norm": 7, "swiglu": 2},
}  # fmt: skip


# Scores choose its experts and keys, and one rounding in bf16 changes a token's choice.
IN_FP32 = ("qwen4_exp",)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_model(name, caplog):
    model, inputs = transformers_models.built(name)
    model.to(torch.float32 if name in IN_FP32 else torch.bfloat16)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        model.to("npu")
        inputs = {name: tensor.to("npu") for name, tensor in inputs.items()}
        npu_ops_adapters.apply()
        model.set_attn_implementation("npu_ops")
        try:
            with transformers_models.Counter() as counter:
                with env.override(strict=True, log="shadow:1"):
                    actual = model(**inputs, use_cache=False).logits
        finally:
            npu_ops_adapters.revert()
    assert (
        actual.device.type == "npu" and transformers_models.by_op(counter.calls) == OPERATORS[name]
    )
    assert_close("logits", actual.cpu(), expected, Tolerance(ratio=3e-2, max_abs=1e-1))
    shadows = [r for r in caplog.records if "against reference" in r.getMessage()]
    assert len(shadows) == sum(OPERATORS[name].values())
    assert all(record.levelno == logging.INFO for record in shadows)


def test_where_torch_npu_has_a_grouped_product_it_stays(monkeypatch):
    """npu-ops leaves PyTorch's grouped product in place if torch_npu has a kernel for it.

    torch_npu for torch 2.13 has none, so PyTorch's waits for the device after each group.
    """
    assert not experts.pytorch_has_one()
    x, offs = torch.zeros(2, 3, device="npu"), torch.tensor([2], device="npu")
    assert experts.ours(x, x[None], offs)().shape == (2, 2)
    monkeypatch.setattr(experts, "pytorch_has_one", lambda: True)
    with pytest.raises(ValueError, match="PyTorch has a grouped product"):
        experts.ours(x, x[None], offs)
