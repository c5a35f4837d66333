"""Applies the adapters when a framework is imported; torch calls `install` as it is imported.

An exception here would make `import torch` fail. So this is one file that needs the standard
library alone, imports the rest of npu-ops only when a watched module has been imported, and turns
whatever goes wrong into one warning: the framework then runs its own code.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib.machinery import ModuleSpec

WATCHED = frozenset(
    {
        "fla.modules.causal_conv1d.ops",
        "fla.modules.conv.causal_conv1d",
        "fla.modules.conv.triton.ops",
        "fla.modules.fused_norm_gate",
        "fla.modules.l2norm",
        "fla.modules.layernorm_gated",
        "fla.modules.norm.fused_norm_gate",
        "fla.modules.norm.l2norm",
        "fla.modules.norm.layernorm_gated",
        "fla.ops.gated_delta_product.chunk",
        "fla.ops.gated_delta_rule.backends",
        "fla.ops.gated_delta_rule.fused_recurrent",
        "fla.ops.gated_delta_rule.gate",
        "megatron.core.jit",
        "megatron.core.fusions.fused_bias_dropout",
        "megatron.core.models.common.embeddings.rope_utils",
        "megatron.core.ssm.gated_delta_net",
        "megatron.core.ssm.gated_delta_net.common",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model",
        "megatron.core.tensor_parallel.random",
        "megatron.core.transformer.attention",
        "megatron.core.transformer.multi_latent_attention",
        "megatron_adaptor.features_manager.features_manager",
        "mindspeed.core.ssm.gated_delta_net",
        "mindspeed.core.ssm.gdn_backend",
        "mindspeed.features_manager.features_manager",
        "mindspeed.features_manager.fusions.fused_rope",
        "mindspeed.megatron_adaptor",
        "mindspeed.patch_utils",
        "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention",
        "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.gated_delta_net",
        "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.rope",
        "sglang.kernels.ops.attention.fla.fused_norm_gate",
        "sglang.kernels.ops.attention.fla.layernorm_gated",
        "sglang.srt.hardware_backend.npu.attention.ascend_backend",
        "sglang.srt.hardware_backend.npu.attention.ascend_gdn_backend",
        "sglang.srt.layers.attention.fla.fused_norm_gate",
        "sglang.srt.layers.attention.fla.layernorm_gated",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "sglang.srt.layers.attention.linear.gdn_backend",
        "sglang.srt.layers.attention.torch_native_backend",
        "sglang.srt.layers.attention.vision",
        "sglang.srt.layers.rotary_embedding",
        "sglang.srt.layers.rotary_embedding.base",
        "sglang.srt.layers.rotary_embedding.mrope",
        "sglang.srt.layers.rotary_embedding.utils",
        "sglang.srt.models.dflash",
        "sglang.srt.models.llama",
        "sglang.srt.models.qwen3",
        "sglang.srt.models.qwen3_5",
        "sglang.srt.models.qwen3_moe",
        "sglang.srt.models.qwen3_next",
        "sglang.srt.models.qwen3_vl",
        "transformers.masking_utils",
        "transformers.modeling_utils",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "transformers.models.qwen2_vl.modeling_qwen2_vl",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
        "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
        "verl.models.transformers.qwen3_5",
    }
)

# sys.exit() in an adapter is an error like any other; only the user's Ctrl-C is not.
_ANY = (Exception, SystemExit, GeneratorExit)
_logger = logging.getLogger("npu_ops")
_reported: set[str] = set()


def install() -> None:
    """Watch imports, and apply the adapters to what is imported already. Never raises."""
    try:
        # Read here as well as in npu_ops.core.env: this must work when nothing else does.
        if "all" in os.environ.get("NPU_OPS_DISABLE", "").replace(" ", "").split(","):
            return
        watch()
        for name in WATCHED & sys.modules.keys():
            _tell_when_imported(sys.modules[name])
        if not WATCHED.isdisjoint(sys.modules):
            import npu_ops_adapters

            npu_ops_adapters.apply()
    except _ANY as error:
        _report(error)


def watch() -> None:
    """Apply the adapters after each import of a watched module."""
    if _finder not in sys.meta_path:
        unwatch()  # a finder of this module before it was reloaded
        sys.meta_path.insert(0, _finder)


def unwatch() -> None:
    """Undo `watch`."""
    ours = (_Finder.__module__, _Finder.__name__)
    for finder in list(sys.meta_path):
        if (type(finder).__module__, type(finder).__name__) == ours:
            sys.meta_path.remove(finder)


class _Finder:
    """Finds watched modules by asking the other finders, and gives them a loader that tells us."""

    def __init__(self):
        self._thread = threading.local()

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in WATCHED or getattr(self._thread, "searching", False):
            return None  # searching: another hook like this one asks us back
        self._thread.searching = True
        try:
            return self._find(fullname, path, target)
        except _ANY as error:
            _report(error)
            return None
        finally:
            self._thread.searching = False

    def _find(self, fullname, path, target):
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """The loader it wraps, until the module runs; then that loader again."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        if name == "_loader":  # a copy that is not initialised yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create else None

    def exec_module(self, module):
        for holder, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._loader.exec_module(module)
        _imported(module)


def _tell_when_imported(module) -> None:
    """For a module that is being imported, and imports torch, which calls us: no finder of ours was
    there when it was found. Python marks its spec when it has run.
    """
    spec = getattr(module, "__spec__", None)
    if type(spec) is not ModuleSpec or not getattr(spec, "_initializing", False):
        return

    class Marked(ModuleSpec):
        @property
        def _initializing(self):
            return True

        @_initializing.setter
        def _initializing(self, value):
            self.__class__ = ModuleSpec
            self._initializing = value
            _imported(module)

    spec.__class__ = Marked


def _imported(module) -> None:
    try:
        name = module.__name__
        if sys.modules.get(name) is not module:
            return  # a private copy made through importlib.util
        import npu_ops_adapters

        npu_ops_adapters.imported(name)
    except _ANY as error:
        _report(error)


def _report(error: BaseException) -> None:
    sentence = f"npu-ops left the framework as it is: {type(error).__name__}: {error}"
    if sentence not in _reported:
        _reported.add(sentence)
        _logger.warning(sentence)


_finder = _Finder()
