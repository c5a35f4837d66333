"""Joins the emulator to a process: parts that wait for the modules they serve."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys

from npu_ops_emulator import torch_npu_start

# Imported once the module is: {module: ours, whose `install()` is called}.
PLUGINS = {
    "triton": "npu_ops_emulator.triton_driver",
    torch_npu_start.MODULE: "npu_ops_emulator.torch_npu_start",
}


def start() -> None:
    """Let each plugin install itself after the module it serves is imported."""
    for module, plugin in PLUGINS.items():
        if module in sys.modules:
            importlib.import_module(plugin).install()
        elif not any(isinstance(f, _After) and f.module == module for f in sys.meta_path):
            sys.meta_path.insert(0, _After(module, plugin))


class _After(importlib.abc.MetaPathFinder):
    """Calls a plugin's `install()` once a module was imported."""

    def __init__(self, module: str, plugin: str):
        self.module, self.plugin = module, plugin

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute, module):
        # Not before: who only asks whether there is such a module takes nothing away.
        sys.meta_path.remove(self)
        execute(module)
        importlib.import_module(self.plugin).install()
