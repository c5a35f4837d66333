"""Import hook: calls a function after a watched module has run, or before an awaited module runs.

`npu_ops_autoload` and `npu_ops_adapters` use this file; it imports neither of them. It uses only
the standard library, because `import torch` runs it.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
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
        "fla.ops.kda.chunk",
        "fla.ops.kda.fused_recurrent",
        "megatron.core.distributed.finalize_model_grads",
        "megatron.core.jit",
        "megatron.core.fusions.fused_bias_dropout",
        "megatron.core.fusions.fused_bias_swiglu",
        "megatron.core.fusions.fused_cross_entropy",
        "megatron.core.models.common.embeddings.rope_utils",
        "megatron.core.models.gpt.experimental_attention_variant_module_specs",
        "megatron.core.ssm.gated_delta_net",
        "megatron.core.ssm.gated_delta_net.common",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope",
        "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model",
        "megatron.bridge.models.qwen_vl.qwen3_vl_provider",
        "megatron.bridge.models.transformer_config",
        "megatron.core.tensor_parallel.cross_entropy",
        "megatron.core.tensor_parallel.random",
        "megatron.core.transformer.attention",
        "megatron.core.transformer.moe.experts",
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.transformer.multi_latent_attention",
        "megatron_adaptor.features_manager.features_manager",
        "mindspeed.core.fusions.fused_rms_norm",
        "mindspeed.core.ssm.gated_delta_net",
        "mindspeed.core.ssm.gdn_backend",
        "mindspeed.core.transformer.moe.grouped_gemm_util",
        "mindspeed.core.transformer.moe.moe_feature.gmm.experts",
        "mindspeed.features_manager.features_manager",
        "mindspeed.features_manager.functional.profile",
        "mindspeed.features_manager.fusions.fused_rope",
        "mindspeed.megatron_adaptor",
        "mindspeed.patch_utils",
        "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention",
        "mindspeed.te.pytorch.module.grouped_linear",
        "mindspeed.te.pytorch.module.layernorm_column_parallel_linear",
        "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.gated_delta_net",
        "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.rope",
        "relax.utils.reloadable_process_group",
        "sglang.kernels.ops.attention.fast_topk",
        "sglang.kernels.ops.attention.fla.fused_norm_gate",
        "sglang.kernels.ops.attention.fla.layernorm_gated",
        "sglang.srt.hardware_backend.npu.attention.ascend_backend",
        "sglang.srt.hardware_backend.npu.attention.ascend_gdn_backend",
        "sglang.srt.hardware_backend.npu.moe.topk",
        "sglang.srt.layers.attention.fla.fused_norm_gate",
        "sglang.srt.layers.attention.fla.layernorm_gated",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "sglang.srt.layers.attention.linear.gdn_backend",
        "sglang.srt.layers.attention.qsa.mqa",
        "sglang.srt.layers.attention.qsa.qsa_indexer",
        "sglang.srt.layers.attention.qwen_sparse_attn_backend",
        "sglang.srt.layers.attention.torch_native_backend",
        "sglang.srt.layers.attention.vision",
        "sglang.srt.layers.hyperconnection",
        "sglang.srt.layers.layernorm",
        "sglang.srt.layers.moe.fused_moe_native",
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
        "sglang.srt.models.qwen4_exp",
        "slime.backends.megatron_utils.initialize",
        "slime.backends.sglang_utils.sglang_engine",
        "slime.ray.placement_group",
        "slime.utils.accelerator",
        "slime.utils.ppo_utils",
        "slime.utils.reloadable_process_group",
        "slime_plugins.models.hf_attention",
        "slime_plugins.models.qwen3_5_vl",
        "slime_plugins.models.qwen3_5_vl_utils",
        "slime_plugins.models.qwen3_next",
        "slime_plugins.models.qwen_gdn_backend",
        "transformers.integrations.moe",
        "transformers.masking_utils",
        "transformers.modeling_utils",
        "verl.models.transformers.npu_patch",
        "verl.models.transformers.qwen3_5",
        "verl.models.transformers.qwen3_vl",
        "verl.utils.torch_functional",
        "verl.workers.engine.fsdp.transformer_impl",
        "vllm.model_executor.layers.fla.ops.fused_recurrent",
        "vllm.model_executor.layers.fla.ops.l2norm",
        "vllm.model_executor.models.qwen3_vl",
        "vllm.model_executor.models.qwen3_vl_moe",
        "vllm.third_party.flash_linear_attention.ops.l2norm",
        "vllm_ascend.attention.attention_v1",
        "vllm_ascend.attention.context_parallel.attention_cp",
        "vllm_ascend.attention.fa3_v1",
        "vllm_ascend.compilation.graph_fusion_pass_manager",
        "vllm_ascend.ops.fused_moe.experts_selector",
        "vllm_ascend.ops.layernorm",
        "vllm_ascend.ops.mm_encoder_attention",
        "vllm_ascend.ops.rotary_embedding",
        "vllm_ascend.ops.triton.fla.chunk",
        "vllm_ascend.ops.triton.fla.l2norm",
        "vllm_ascend.ops.triton.fla.sigmoid_gating",
        "vllm_ascend.ops.triton.fused_gdn_gating",
        "vllm_ascend.ops.triton.mamba.causal_conv1d",
        "vllm_ascend.patch.worker.patch_qwen3_5",
        "vllm_ascend.patch.worker.patch_qwen3_next",
        "vllm_ascend.patch.worker.patch_qwen3vl",
    }
)

# Modules that the hook reports before they run. This one imports Megatron-LM, and MindSpeed must be
# imported first.
AWAITED = frozenset({"slime.backends.megatron_utils"})

_MODELS = "transformers.models."
_MODEL = re.compile(r"(\w+)\.modeling_\1")

Callback = Callable[[str], None]  # called with the name of a module

# Treat sys.exit() in an adapter like any other error. Only the user's Ctrl-C passes.
_ANY = (Exception, SystemExit, GeneratorExit)
_logger = logging.getLogger("npu_ops")
_reported: set[str] = set()


def watch(callback: Callback, before: Callback | None = None) -> None:
    """Call `callback` after each run of a watched module, `before` before an awaited module runs.

    They replace the callbacks of an earlier call of `watch`.
    """
    finders = _finders()
    for finder in finders:
        finder.callback, finder.before = callback, before
    if not finders:
        sys.meta_path.insert(0, _Finder(callback, before))


def is_watched(name: str) -> bool:
    """Return whether `watch` reports a module: one of WATCHED, or a model of transformers."""
    return name in WATCHED or model_of_transformers(name) is not None


def model_of_transformers(name: str) -> str | None:
    """Return the model that a transformers module defines: `...qwen3.modeling_qwen3` -> "qwen3"."""
    found = name.startswith(_MODELS) and _MODEL.fullmatch(name, len(_MODELS))
    return found[1] if found else None


def unwatch() -> None:
    """Remove the import hook that `watch` has installed."""
    for finder in _finders():
        sys.meta_path.remove(finder)


def is_watching() -> bool:
    """Return whether `watch` is active."""
    return bool(_finders())


def _finders() -> list:
    """Return this hook's finders, including one installed before this module was reloaded."""
    return [finder for finder in sys.meta_path if type(finder).__module__ == __name__]


class _Finder:
    """Finds watched modules with the other finders, and gives them a loader that reports them."""

    def __init__(self, callback: Callback, before: Callback | None):
        self.callback, self.before = callback, before
        self._thread = threading.local()

    def find_spec(self, fullname, path=None, target=None):
        known = is_watched(fullname) or fullname in AWAITED
        if not known or getattr(self._thread, "searching", False):
            return None  # if searching: another import hook calls this finder from inside _find
        self._thread.searching = True
        try:
            with reporting:
                return self._find(fullname, path, target)
        finally:
            self._thread.searching = False

    def _find(self, fullname, path, target):
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader:
    """Wraps a loader until the module has run; then restores that loader."""

    def __init__(self, loader, finder: _Finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        if name == "_loader":  # copy.copy asks before _loader is set: avoid endless recursion
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create else None

    def exec_module(self, module):
        for holder, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        if self._finder.before and module.__name__ in AWAITED:
            _tell(self._finder.before, module)
        self._loader.exec_module(module)
        if is_watched(module.__name__):
            _tell(self._finder.callback, module)


def tell_when_torch_is_there(before: Callback) -> None:
    """Report awaited modules that are already being imported, after torch has run.

    Such a module imports torch, which calls this code. Until torch and its backends have run, it is
    unknown whether there is an NPU.
    """
    for name in AWAITED & sys.modules.keys():
        if getattr(sys.modules[name].__spec__, "_initializing", False):
            tell_when_imported(sys.modules["torch"], lambda torch, name=name: before(name))


def tell_when_imported(module, callback: Callback) -> None:
    """Report a module that is already being imported, after it has run.

    The finder missed the module, because the module's import started before this hook existed: the
    module imports torch, and torch's import installs the hook. After the module has run, Python
    resets `_initializing` in its spec. `Marked` detects this and calls `callback`.
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
            _tell(callback, module)

    spec.__class__ = Marked


def _tell(callback: Callback, module) -> None:
    with reporting:
        name = module.__name__
        if sys.modules.get(name) is module:  # not a private copy made through importlib.util
            callback(name)


class _Reporting:
    """A context that turns an error inside it into one warning."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, _ANY):
            return False
        sentence = f"npu-ops left the framework as it is: {kind.__name__}: {error}"
        if sentence not in _reported:
            _reported.add(sentence)
            _logger.warning(sentence)
        return True


reporting = _Reporting()
