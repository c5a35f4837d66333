"""A stand-in for sgl-kernel-npu, which is not on PyPI and runs only on NPUs.

It has the functions that SGLang calls for a Qwen model, in torch or by npu-ops. All other names can
be imported, and raise when called.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


def absent(name):
    """Return a function that raises, for a name that a module here does not define."""
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*args, **kwargs):
        raise NotImplementedError(f"{name} is not in this double of sgl-kernel-npu")

    return function


class _Absent(types.ModuleType):
    """A module without definitions of its own."""

    def __getattr__(self, name):
        return absent(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that have no file, after all other finders."""

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
