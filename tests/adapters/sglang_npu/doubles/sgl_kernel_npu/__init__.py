"""A double of sgl-kernel-npu, which is not on PyPI and runs on NPUs alone.

What SGLang's path of a Qwen model needs of it is here, in torch or by npu-ops; every other name can
be imported, and says when it is called that it is not there.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


def absent(name):
    """What a module of this double has under a name that it does not define."""
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*args, **kwargs):
        raise NotImplementedError(f"{name} is not in this double of sgl-kernel-npu")

    return function


class _Absent(types.ModuleType):
    """A module of which nothing is here."""

    def __getattr__(self, name):
        return absent(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: for what no file is there."""

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
