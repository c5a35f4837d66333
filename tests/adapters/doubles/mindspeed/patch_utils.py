"""The patch manager: one record per dotted name, with one function and any number of wrappers."""

import importlib
import importlib.machinery
import sys
import types


class Patch:
    def __init__(self, name, create_dummy=False):
        self.create_dummy = create_dummy
        self.orig_module_name, _, self.orig_func_name = name.rpartition(".")
        self.orig_module = self.orig_func = None
        self.patch_func = self.final_patch_func = None
        self.wrappers = []
        self.is_applied = False

    def set_patch_func(self, function, force_patch=False):
        if function.__name__.endswith(("wrapper", "decorator")):
            if function not in self.wrappers:
                self.wrappers.append(function)
        elif self.patch_func and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = function
        self.is_applied = False

    def remove_patch(self):
        for name, module in list(sys.modules.items()):
            if "mindspeed" not in name:
                self._swap(module, self.final_patch_func, self.orig_func)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False

    def remove_wrappers(self):
        self.wrappers.clear()

    def apply_patch(self):
        if self.is_applied:
            return
        owner, current = self._locate()
        if self.orig_module is None:
            self.orig_module, self.orig_func = owner, current
        final = self.patch_func or self.orig_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.orig_func_name, final)
        for module in list(sys.modules.values()):
            self._swap(module, current, final)
        self.is_applied, self.final_patch_func = True, final

    def _swap(self, module, old, new):
        """Replace `old` by `new` in a module that holds that object under the function's name."""
        if getattr(module, self.orig_func_name, self) is old:
            setattr(module, self.orig_func_name, new)

    def _locate(self):
        """Find the module or class, and its attribute; create a missing one as None."""
        if self.create_dummy:
            self._make_modules()
        try:
            owner = importlib.import_module(self.orig_module_name)
        except ModuleNotFoundError:
            module, _, name = self.orig_module_name.rpartition(".")
            owner = getattr(importlib.import_module(module), name)
        if not hasattr(owner, self.orig_func_name):
            setattr(owner, self.orig_func_name, None)
        return owner, getattr(owner, self.orig_func_name)

    def _make_modules(self):
        """Create the packages that are not installed."""
        path = self.orig_module_name.split(".")
        for name in (".".join(path[: i + 1]) for i in range(len(path))):
            if name not in sys.modules:
                sys.modules[name] = module = types.ModuleType(name)
                module.__file__ = "mindspeed.dummy_module.py"
                module.__spec__ = importlib.machinery.ModuleSpec(name, None)
                parent, _, last = name.rpartition(".")
                if parent:
                    setattr(sys.modules[parent], last, module)


class MindSpeedPatchesManager:
    patches_info = {}

    @staticmethod
    def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        patches = MindSpeedPatchesManager.patches_info
        patch = patches.setdefault(orig_func_name, Patch(orig_func_name, create_dummy))
        patch.set_patch_func(new_func, force_patch)

    @staticmethod
    def apply_patches():
        for patch in list(MindSpeedPatchesManager.patches_info.values()):
            patch.apply_patch()

    @staticmethod
    def remove_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()
