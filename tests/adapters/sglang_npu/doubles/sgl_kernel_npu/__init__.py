"""A double of sgl-kernel-npu, which is not on PyPI and runs only on NPUs.

It has the functions that SGLang calls for a Qwen model, in torch or by npu-ops. Every other name
can be imported, and raises when it is called.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


def absent(name):
    """Return the value of a name that a module of this double does not define."""
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*args, **kwargs):
        raise NotImplementedError(f"{name} is not in this double of sgl-kernel-npu")

    return function


class _Absent(types.ModuleType):
    """A module that defines nothing."""

    def __getattr__(self, name):
        return absent(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules without a file, after all other finders."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
importlib.import_module(f"{__name__}.cann")
