"""slime's own conversion of a Hugging Face checkpoint to Megatron's, on the CPU and in fp32.

python slime_convert.py MODEL ARGUMENTS...

mbridge has no name for Qwen3-Next without experts: its checkpoint has the weights that Megatron
draws.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys

import slime_train
import slime_worker
import torch

# Megatron's own layers, and Transformer Engine's, for which mbridge has the names.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def main(model: str, *arguments: str) -> None:
    slime_worker.setup()
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, device_id, **kw: start(backend, **kw)
    from slime.backends.megatron_utils import arguments as defaults

    slime_train.in_fp32(defaults)
    slime_worker.with_local_layers(None)
    bridge = importlib.import_module("mbridge.core.bridge").Bridge
    if model == "qwen3":
        with_fused_names(bridge)
    else:
        bridge.load_weights = lambda self, model, path, memory_efficient: None
    sys.argv[1:] = arguments
    package = pathlib.Path(importlib.util.find_spec("slime").origin).parent
    sys.path.insert(0, str(package.with_name("tools")))
    importlib.import_module("convert_hf_to_torch_dist").main()


def with_fused_names(bridge) -> None:
    name_of = bridge._weight_name_mapping_mcore_to_hf

    def fused(self, name: str):
        for local, theirs in FUSED.items():
            name = name.replace(local, theirs)
        return name_of(self, name)

    bridge._weight_name_mapping_mcore_to_hf = fused


if __name__ == "__main__":
    main(*sys.argv[1:])
