"""How long a kernel takes on an NPU, predicted from what the vendor's compiler made of it.

    launches = of_case("rope", "qwen3-vl-8b", torch.bfloat16, "Ascend910B4-1")
    for prediction in predict_all(launches, "Ascend910B4-1"):
        print(prediction.kernel, prediction.us, prediction.bottleneck)

Nothing that it says was measured: it is labelled `npu-model` and carries a range. How far it can be
trusted: docs/npu-model.md. The command: `npu-ops model --help`.
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
