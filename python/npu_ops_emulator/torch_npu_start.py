"""What torch_npu does at import that has no meaning here."""

from __future__ import annotations

import sys


def install() -> None:
    """Skip the search for a CANN installation: not finding one is printed to stdout."""
    sys.modules["torch_npu._init.registry.registry_manager"]._cann_package_check = lambda: None
