"""Predicts the time of a kernel on an NPU from the vendor compiler's output.

    launches = of_case("rope", "qwen3-vl-8b", torch.bfloat16, "Ascend910B4-1")
    for prediction in predict_all(launches, "Ascend910B4-1"):
        print(prediction.kernel, prediction.us, prediction.bottleneck)

Predictions are not measurements: they are labelled `npu-model` and have a range. Their accuracy:
docs/npu-model.md. The command: `npu-ops model --help`.
"""

from __future__ import annotations

from npu_ops_tools.model.launched import kernel_of_file, of_call, of_case
from npu_ops_tools.model.machine import Unknown
from npu_ops_tools.model.prediction import LABEL, Prediction, predict, predict_all

__all__ = [
    "LABEL",
    "Prediction",
    "Unknown",
    "kernel_of_file",
    "of_call",
    "of_case",
    "predict",
    "predict_all",
]
