"""The model held against measured silicon: docs/npu-model.md.

`measured.csv` has times of real NPUs, each with its source and licence (MulanPSL-2.0.txt is beside
costs.csv). `kernels.py` has kernels that do the same, `compiled.json.xz` what the vendor's compiler
made of them, `cases.py` which of them stands for which row, `check.py` what the model says of them,
and `page.py` writes it down.
"""
