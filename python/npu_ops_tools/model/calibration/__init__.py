"""Calibration: measure the model's constants on an NPU, and fit them.

kernels.py      Triton kernels, each dominated by one cost
benchmarks.py   launches and times them, in `npu-ops verify --full`
fit.py          fits the constants to the times: `npu-ops model --calibrate report.json`
"""
