"""Targets of all public functions, from the modules in `ops/`."""

from __future__ import annotations

import importlib
import pkgutil

from fuzz import ops
from fuzz.target import Target

TARGETS: dict[str, Target] = {}
for _module in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
    TARGETS |= importlib.import_module(_module.name).TARGETS
