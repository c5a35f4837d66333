"""Installs the emulator's plugins in a process, after the modules they patch are imported."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable

# {module: plugin}. A plugin is imported and installed after its module is imported.
PLUGINS = {
    "triton": "npu_ops_emulator.triton_driver",
    "npu_ops.core.ascendc": "npu_ops_emulator.ascendc",
    "torch_npu._init.registry.registry_manager": "npu_ops_emulator.torch_npu_start",
}


def start() -> None:
    """Install each plugin after its module is imported."""
    for module, plugin in PLUGINS.items():
        if module in sys.modules:
            importlib.import_module(plugin).install()
            continue
        # If the plugin is imported first, it imports the module itself. Then the plugin is only
        # half imported when the module is ready, so its installation waits for the plugin's import.
        _after(module, lambda _, plugin=plugin: importlib.import_module(plugin))
        _after(plugin, lambda imported: imported.install())


def _after(name: str, action: Callable) -> None:
    if not any(isinstance(finder, _After) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _After(name, action))


class _After(importlib.abc.MetaPathFinder):
    """Calls an action with a module after it was imported."""

    def __init__(self, name: str, action: Callable):
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute, module):
        # Here and not in find_spec: a lookup without an import must not remove this finder.
        sys.meta_path.remove(self)
        execute(module)
        self.action(module)
