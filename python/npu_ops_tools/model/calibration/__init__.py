"""What the model's constants stand for, measured on an NPU, and constants that fit it.

kernels.py      Triton kernels, each of which is about one thing
benchmarks.py   how they are launched and timed: a part of `npu-ops verify --full`
fit.py          constants for what was measured: `npu-ops model --calibrate report.json`
"""
