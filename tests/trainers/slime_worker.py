"""Set up each process in a run of slime: Ray's workers and their driver."""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import pathlib
import sys
import types

import counting
import slime_doubles
import torch

VARIANTS = "experimental_attention_variant"
CALLS = collections.Counter()
FUSED = {
    "fused_bias_swiglu": ("swiglu", "swiglu_back"),
    "fused_cross_entropy": (
        *("calculate_logits_max", "calculate_predicted_logits"),
        *("calculate_cross_entropy_loss", "calculate_gradients"),
    ),
}


def setup() -> None:
    engine = bool(os.environ.get("SLIME_ENGINE"))
    slime_doubles.install({"wandb": {}} if engine else slime_doubles.MODULES)
    if os.environ["SLIME_WHO"] == "truth":
        on_cpu()
    else:
        on_npu()
        with_slimes_patches()
    if engine:
        importlib.import_module("slime_engine").install()
    for_newer_torch()
    record()


def for_newer_torch(home: str = "slime") -> None:
    """Forward the collectives that torch 2.13 renamed, which slime's process groups do not know."""
    groups = importlib.import_module(f"{home}.utils.reloadable_process_group")
    group = groups.ReloadableProcessGroup
    for name in ("all_gather_single", "all_to_all_single", "reduce_scatter_single"):
        setattr(group, name, functools.partialmethod(group._fwd, name))


def on_cpu() -> None:
    """Read "cuda" in slime and Megatron-LM as "cpu"."""
    import slime_delta_net

    slime_doubles.install(slime_delta_net.MODULES)
    with_bare_bridge()
    read_on_cpu()


def read_on_cpu() -> None:
    import upstream_megatron

    for folder in os.environ["SLIME_SOURCES"].split(os.pathsep):
        upstream_megatron.read_on_cpu(pathlib.Path(folder).resolve())
    upstream_megatron.complete_torch_cpu()
    torch.cpu.mem_get_info = lambda device=None: (1 << 34, 1 << 34)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.cpu, name, lambda device=None: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(torch.cpu, name, lambda device=None: None)


def on_npu() -> None:
    """Add stand-ins for modules that MindSpeed imports and this machine lacks.

    torch_npu is the real one.
    """
    import upstream_mindspeed

    upstream_mindspeed.without_torchair()
    slime_doubles.install({"acl": {"get_soc_name": lambda: "Ascend910B3"}})
    sys.meta_path.append(upstream_mindspeed.StandIns(("hccl", "six")))


def with_slimes_patches() -> None:
    """Prepare a process of a run with patches of slime ("shipped" or "engine").

    SLIME_WHOLE_BRIDGE: run Bridge's own `__init__.py`. SLIME_MINDSPEED_FIRST: import MindSpeed now.
    """
    if not os.environ.get("SLIME_WHOLE_BRIDGE"):
        with_bare_bridge()
    if os.environ.get("SLIME_MINDSPEED_FIRST"):
        importlib.import_module("mindspeed.megatron_adaptor")
        with_kernels_that_compile()


def with_bare_bridge() -> None:
    """Import Bridge's modules without running its packages' `__init__.py`."""
    import upstream_bridge

    sys.meta_path.insert(0, upstream_bridge.Bare(pathlib.Path(os.environ["SLIME_BRIDGE"])))
    without_marks()


def with_whole_bridge() -> None:
    """For slime's --megatron-to-hf-mode bridge: work around four faults of Bridge 0.3.1.

    - For Qwen3-Next it imports a name of a later Megatron-LM.
    - It passes process groups only to models that it builds itself, not to slime's.
    - Its CUDA profiler marks raise, and it averages deepstack's gradients (see the two functions).
    """
    specs = importlib.import_module(f"megatron.core.models.gpt.{VARIANTS}_module_specs")
    vars(specs).setdefault(f"get_transformer_block_with_{VARIANTS}_spec", None)
    without_marks()
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
    from megatron.core.process_groups_config import ProcessGroupCollection

    provide = Qwen3VLModelProvider.provide

    def with_groups(self, *args, **options):
        self._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return provide(self, *args, **options)

    Qwen3VLModelProvider.provide = with_groups
    with_deepstacks_gradients()


def with_deepstacks_gradients() -> None:
    """Sum deepstack's gradients: with sequence parallelism each rank has only its tokens' part.

    Bridge averages them instead.
    """
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    split = model.split_deepstack_embs

    def split_summed(masks, embeds, **sizes):
        if embeds is not None:
            embeds = [copy_to_tensor_model_parallel_region(x) for x in embeds]
        return split(masks, embeds, **sizes)

    model.split_deepstack_embs = split_summed


def without_marks() -> None:
    """Drop the CUDA profiler marks of Bridge's Qwen3-VL, which raise without CUDA."""
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *message: None


def with_kernels_that_compile() -> None:
    """Select fla 0.6.0's other kernel for a gradient of the delta rule.

    triton-ascend 3.2.0 rejects the first: it needs 520 KiB of a core's 192 KiB.
    """
    kernels = importlib.import_module("fla.ops.common.backends.triton_ascend.chunk_o")
    kernels._get_dqkwg_full_tiles = lambda **sizes: None


def with_local_layers(args) -> None:
    """For --custom-megatron-init-path: use Megatron's own layers, changed to take packed sequences.

    slime requests Transformer Engine's layers for models with Gated Delta Net.
    """
    import upstream_bridge
    from megatron.core.models.gpt import gpt_layer_specs

    upstream_bridge.without_packed_attention()
    without_router_gemm()
    experts_on_cpu()
    block = gpt_layer_specs.get_gpt_decoder_block_spec

    def local(config, use_transformer_engine, **options):
        return block(config, use_transformer_engine=False, **options)

    gpt_layer_specs.get_gpt_decoder_block_spec = local
    norm_once("qwen3_next")


def without_router_gemm() -> None:
    """Define a name that Megatron compares with None but defines only with Transformer Engine."""
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None


def with_experts_group() -> None:
    """Tell the checkpoints of MindSpeed's experts over which groups they are parallel."""
    from megatron.core import parallel_state
    from mindspeed.te.pytorch.module import grouped_linear

    grouped_linear.make_sharded_tensors_for_checkpoint = functools.partial(
        grouped_linear.make_sharded_tensors_for_checkpoint,
        tp_group=parallel_state.get_expert_tensor_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def with_gradients_once() -> None:
    """Do not sum gradients of slime's own layers over ranks: each rank has the whole gradient."""
    hf_attention = importlib.import_module("slime_plugins.models.hf_attention")
    regions = hf_attention.tensor_parallel
    hf_attention.tensor_parallel = types.SimpleNamespace(
        gather_from_sequence_parallel_region=functools.partial(
            regions.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False
        ),
        scatter_to_sequence_parallel_region=regions.scatter_to_sequence_parallel_region,
    )


def experts_on_cpu() -> None:
    """Leave token counts where they are: Megatron would copy them to the CPU on a CUDA stream."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def stay(self, point: str, tokens_per_expert=None):
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = stay


def norm_once(model: str) -> None:
    """Drop Megatron's input norm of slime's layers, which already normalise their input."""
    from megatron.core.transformer.identity_op import IdentityOp

    layers = importlib.import_module(f"slime_plugins.models.{model}")
    name = f"get_{model}_spec"
    block = getattr(layers, name)

    def once(*args):
        spec = block(*args)
        for layer in spec.layer_specs:
            if layer.submodules.self_attention.module is layers.Attention:
                layer.submodules.input_layernorm = IdentityOp
        return spec

    setattr(layers, name, once)


def record(home: str = "slime.utils") -> None:
    """Write each step's metrics to the rank's file, and count calls of npu_ops and torch_npu."""
    logging_utils = importlib.import_module(f"{home}.logging_utils")
    logging_utils.log = lambda args, metrics, step_key: write(metrics)
    count()


def count() -> None:
    counting.on_calls(counting.operators(), note)
    if os.environ["SLIME_WHO"] != "truth":
        import torch_npu

        counting.on_calls(counting.TORCH_NPU, note, torch_npu)


def count_fused(args) -> None:
    """For --custom-megatron-init-path: fix known faults, and count calls of the functions in FUSED.

    slime's patches remove `@jit_fuser` from these functions.
    """
    without_router_gemm()
    if args.num_experts:
        with_experts_group()
    if args.spec:
        with_gradients_once()
    if os.environ.get("SLIME_WHOLE_BRIDGE"):
        with_whole_bridge()
    count_functions()


def count_functions() -> None:
    for module, names in FUSED.items():
        module = importlib.import_module(f"megatron.core.fusions.{module}")
        counting.on_calls(names, note, module)


def note(name: str) -> None:
    CALLS[name] += 1


def before_step(args, rollout_id, step_id, *training) -> None:
    """For --custom-megatron-before-train-step-hook-path: write each rank's calls so far."""
    write({"calls": CALLS})


def write(entry: dict) -> None:
    results = pathlib.Path(os.environ["SLIME_RESULTS"])
    with open(results / f"{os.environ.get('RANK', 'manager')}.jsonl", "a") as file:
        file.write(json.dumps(entry, default=float) + "\n")
