"""SGLang's NPU platform on the emulated NPU, with stand-ins for packages that need a real one.

sgl-kernel-npu is not on PyPI. torchair is part of torch_npu and needs CANN's graph engine: SGLang
requests a compiler from it at import, but compiles nothing with it here.
"""

import os
import pathlib
import sys
import types


def activate() -> str | None:
    """Install the stand-ins if SGLANG_PLATFORM requests them, and return SGLang's own platform."""
    if os.environ.get("SGLANG_PLATFORM") != "sglang_npu":
        return None
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "doubles"))
    import torch_npu  # registers the torchair that is replaced next

    _replace_torchair()
    # SGLang uses torch.npu as torch.cuda; torch 2.13 chooses its broadcast by CUDA's capability.
    if "TORCH_NPU_DEVICE_CAPABILITY" not in os.environ:
        torch_npu.npu.get_device_capability = lambda device=None: (0, 0)
    return "sglang.srt.platforms.npu:NPUSRTPlatform"


def register() -> None:
    """Have SGLang use its torch code instead of a kernel that the emulator cannot run."""
    if os.environ.get("SGLANG_PLATFORM") == "sglang_npu":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.mem_cache.allocation.support_triton"
        HookRegistry.register(target, lambda backend: False, HookType.REPLACE)


def _replace_torchair() -> None:
    """Replace torchair by a stand-in with the names that SGLang uses."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchair"]:
        del sys.modules[name]
    patch = "ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce"
    for path in (patch, "configs.compiler_config"):
        name = ["torchair"]
        for part in [*path.split("."), None]:
            module = sys.modules.setdefault(".".join(name), types.ModuleType(".".join(name)))
            if len(name) > 1:
                setattr(sys.modules[".".join(name[:-1])], name[-1], module)
            name.append(part)
    sys.modules["torchair"].get_npu_backend = lambda compiler_config=None: "eager"
    settings = types.SimpleNamespace(mode=None, debug=types.SimpleNamespace())
    sys.modules["torchair.configs.compiler_config"].CompilerConfig = lambda: settings
