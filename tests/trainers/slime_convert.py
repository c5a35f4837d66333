"""Run slime's own conversion of a Hugging Face checkpoint to Megatron's, on the CPU in fp32.

python slime_convert.py MODEL ARGUMENTS...

mbridge knows neither Qwen3-Next without experts nor Qwen3-VL. Their checkpoints get the weights
that Megatron draws.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Mapping

import slime_qwen3_vl
import slime_train
import slime_worker
import torch

# Weight names of Megatron's own layers, and those of Transformer Engine's, which mbridge expects.
ATTENTION = {r"input_layernorm\.weight": "self_attention.linear_qkv.layer_norm_weight"}
FUSED = {
    "qwen3": ATTENTION | {r"pre_mlp_layernorm\.weight": "mlp.linear_fc1.layer_norm_weight"},
    "qwen3_moe": ATTENTION | {r"local_experts\.(\d+)\.(linear_fc.)\.weight": r"\2.weight\1"},
}


def main(model: str, *arguments: str) -> None:
    slime_worker.setup()
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, device_id, **kw: start(backend, **kw)
    from slime.backends.megatron_utils import arguments as defaults

    slime_train.in_fp32(defaults)
    slime_worker.with_local_layers(None)
    if model in FUSED:
        bridge = importlib.import_module("mbridge.core.bridge").Bridge
        with_fused_names(bridge, FUSED[model])
    else:
        importlib.import_module("mbridge").AutoBridge.from_pretrained = as_drawn
    sys.argv[1:] = arguments
    package = pathlib.Path(importlib.util.find_spec("slime").origin).parent
    sys.path.insert(0, str(package.with_name("tools")))
    tool = importlib.import_module("convert_hf_to_torch_dist")
    if model == "qwen3_vl":
        tool.get_model_provider_func = lambda args: slime_qwen3_vl.provide
    tool.main()


def as_drawn(*args, **options):
    """Replace mbridge's class for a model: weights stay as Megatron drew them."""
    return types.SimpleNamespace(load_weights=lambda *args, **options: None)


def with_fused_names(bridge, names: Mapping[str, str]) -> None:
    name_of = bridge._weight_name_mapping_mcore_to_hf

    def fused(self, name: str):
        for local, theirs in names.items():
            name = re.sub(local, theirs, name)
        return name_of(self, name)

    bridge._weight_name_mapping_mcore_to_hf = fused


if __name__ == "__main__":
    main(*sys.argv[1:])
