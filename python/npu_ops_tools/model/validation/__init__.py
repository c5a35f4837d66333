"""Validation of the model against measured times of NPUs: docs/npu-model.md.

measured.csv       measured times, each with its source and licence (MulanPSL-2.0.txt is next to
costs.csv)
kernels.py         Triton kernels that do the same work
compiled.json.xz   the vendor compiler's output for them
cases.py           which kernel stands for which row
check.py           the model's predictions for the rows
stages.py          Gated Delta Net's stages: measured times (stages.csv) and predictions
held_out.md        which measurements were not used to make the model
page.py            writes the results to the docs page
"""
