"""Skips parts of torch_npu's import that are useless on the emulated NPU."""

from __future__ import annotations

import sys


def install() -> None:
    """Skip the search for CANN, which prints to stdout if it finds none."""
    sys.modules["torch_npu._init.registry.registry_manager"]._cann_package_check = lambda: None
