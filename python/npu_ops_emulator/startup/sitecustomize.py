"""Python runs this file at start, because its folder is first on an emulated process's PYTHONPATH.

It installs the emulator's import hooks for Triton, AscendC kernels and torch_npu. Then it runs the
next sitecustomize on the path, which it hides, if there is one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _prepare():
    # A Python other than the one that started the emulator may lack npu_ops_emulator.
    if os.environ.get("NPU_OPS_EMULATOR") == "1" and importlib.util.find_spec("npu_ops_emulator"):
        from npu_ops_emulator import runtime

        runtime.start()


def _run_hidden():
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_prepare()
_run_hidden()
