"""Python runs this at the start of each process of an unchanged slime or Relax.

It provides stand-ins for packages that this machine lacks, and records what the trainer computes.
The trainer, Megatron-LM and MindSpeed are unchanged with two exceptions:

- Training is in fp32, because bf16 would hide differences. Another SLIME_DTYPE turns this off.
- Metrics also go to a file.
"""

import importlib.machinery
import os
import sys


class _After(importlib.machinery.SourceFileLoader):
    """A loader that runs a module, then the observer's function for it."""

    def exec_module(self, module):
        super().exec_module(module)
        import slime_observer

        slime_observer.AFTER[module.__name__](module)


class _Finder:
    NAMES = (
        "mindspeed",
        "relax.backends.megatron.arguments",
        "relax.backends.megatron.model",
        "relax.utils.tracking_utils",
        "slime.observability.logging_utils",
        "slime.utils.logging_utils",
        "slime.backends.megatron_utils.arguments",
        "slime.backends.megatron_utils.model",
    )

    def find_spec(self, name, path=None, target=None):
        if name not in self.NAMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _After(name, spec.origin)
        return spec


if "SLIME_STOCK" in os.environ:
    import slime_doubles

    slime_doubles.install({"wandb": {}} if "SLIME_ENGINE" in os.environ else slime_doubles.MODULES)
    slime_doubles.install({"acl": {}, "acl.rt": {}})
    acl = sys.modules["acl"]
    acl.get_soc_name = lambda: os.environ["NPU_OPS_EMULATOR_SOC"]
    acl.rt = sys.modules["acl.rt"]  # Ray counts NPUs by acl.rt
    acl.rt.get_device_count = lambda: (int(os.environ["NPU_OPS_EMULATOR_DEVICES"]), 0)
    sys.meta_path.insert(0, _Finder())
