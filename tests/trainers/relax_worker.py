"""Set up each process in a run of Relax: Ray's workers and their driver.

slime_worker.py does the same for slime, from which Relax was derived. Both read the environment
variables that slime_train.py explains.
"""

from __future__ import annotations

import os
import sys

import slime_doubles
import slime_worker
import torch

BRIDGE = "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl"


def setup() -> None:
    slime_doubles.install()
    if os.environ["SLIME_WHO"] == "truth":
        on_cpu()
    else:
        slime_worker.on_npu()
    slime_worker.for_newer_torch("relax")
    record()


def on_cpu() -> None:
    """Make Relax's trainer run on CPUs: replace functions that only GPUs have."""
    slime_worker.with_bare_bridge()
    slime_worker.read_on_cpu()
    torch.cpu.get_device_properties = lambda device=None: None
    from relax.utils import device
    from relax.utils.training import tensor_backper

    tensor_backper._PIN_MEMORY = False
    device.ray_get_device_ids = lambda: [0]
    device._detect_accelerator_from_ray_cluster = lambda: None  # the cluster has "NPU"s


def record() -> None:
    """Write each step's metrics to the rank's file, and count calls of npu_ops and torch_npu."""
    import transfer_queue

    # rollouts come from files, without the queue
    transfer_queue.init = lambda conf: None
    transfer_queue.get_client = lambda: None
    from relax.utils import tracking_utils

    tracking_utils.log = lambda args, metrics, step_key: slime_worker.write(metrics)
    tracking_utils.flush_metrics = lambda args, step: True  # else to a Ray Serve service
    slime_worker.count()


def on_megatron(args) -> None:
    """For --custom-megatron-init-path: set what MindSpeed-Bridge's recipes set and Relax does not.

    Relax's patch selects kernels of the delta rule that refuse fp32. These tests use
    MindSpeed-Bridge's PyTorch function instead.
    """
    args.use_triton_gdn = args.use_ascend_gdn = False
    slime_worker.count_fused(args)
    layer = sys.modules.get(f"{BRIDGE}.gated_delta_net")
    if layer and os.environ["SLIME_WHO"] == "shipped":
        layer.HAVE_FLA = False


def packed(args) -> None:
    """For --custom-megatron-init-path: let Megatron's own attention take packed sequences.

    Without a Megatron checkpoint the model keeps the weights that Megatron draws. Bridge would load
    Hugging Face's.
    """
    import upstream_bridge
    from relax.backends.megatron import checkpoint

    upstream_bridge.without_packed_attention()
    checkpoint._load_checkpoint_hf = lambda **options: (0, 0)
