"""What slime newer than v0.2.2 needs on NPUs beside npu-ops; no file of slime's is changed.

Ray's `worker_process_setup_hook`, and the driver before it imports train.py: setup.
slime's --custom-megatron-init-path: start. Ray is told how many GPUs there are, for slime asks for
those: `ray start --head --num-gpus 8`.
"""

from __future__ import annotations

import importlib

import torch


def setup() -> None:
    """MindSpeed before Megatron, and slime's device, of which it knows CUDA and MUSA."""
    importlib.import_module("mindspeed.megatron_adaptor")
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class NPU(TorchAccelerator):
        name = device_type = "npu"
        communication_backend_name = "hccl"

        def _module(self):
            return torch.npu

    # MindSpeed makes torch.cuda of torch.npu, so that slime's CUDA, 100, is available too.
    accelerator.register_accelerator("npu", NPU, priority=300, communication_backends=("hccl",))


def start(args) -> None:
    """MindSpeed's features by the arguments, as slime's patch for v0.2.2 has it.

    But not its gated delta rule in place of fla's, which takes bf16 alone: npu-ops is asked by fla.
    """
    importlib.import_module("mindspeed.megatron_adaptor").repatch(vars(args))
    placed = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info
    placed["fla.ops.gated_delta_rule.chunk_gated_delta_rule"].remove_patch()
