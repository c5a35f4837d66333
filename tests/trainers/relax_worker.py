"""What each process of a run of Relax does first: Ray's workers and their driver.

slime_worker.py is the same for slime, on which Relax is built; its variables say who computes.
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
    """Relax knows CPUs; its trainer asks them for what it asks of GPUs."""
    slime_worker.with_bare_bridge()
    slime_worker.read_on_cpu()
    torch.cpu.get_device_properties = lambda device=None: None
    from relax.utils import device
    from relax.utils.training import tensor_backper

    tensor_backper._PIN_MEMORY = False
    device.ray_get_device_ids = lambda: [0]
    device._detect_accelerator_from_ray_cluster = lambda: None  # which has "NPU"s


def record() -> None:
    """Each step's metrics to a file of the rank; calls that reach npu_ops, and torch_npu's."""
    import transfer_queue

    # Rollouts come from files, so the queue is not used.
    transfer_queue.init = lambda conf: None
    transfer_queue.get_client = lambda: None
    from relax.utils import tracking_utils

    tracking_utils.log = lambda args, metrics, step_key: slime_worker.write(metrics)
    tracking_utils.flush_metrics = lambda args, step: True  # to a service of Ray Serve
    slime_worker.count()


def on_megatron(args) -> None:
    """For --custom-megatron-init-path: what MindSpeed-Bridge's own recipes set and Relax does not.

    Its kernels of the delta rule, which Relax's patch chooses, refuse fp32; the check has its
    function in PyTorch in their place.
    """
    args.use_triton_gdn = args.use_ascend_gdn = False
    slime_worker.count_fused(args)
    layer = sys.modules.get(f"{BRIDGE}.gated_delta_net")
    if layer and os.environ["SLIME_WHO"] == "shipped":
        layer.HAVE_FLA = False


def packed(args) -> None:
    """For --custom-megatron-init-path: Megatron's own attention, which it has take packed ones.

    And where nothing is loaded, Megatron's own weights: Bridge would load Hugging Face's.
    """
    import upstream_bridge
    from relax.backends.megatron import checkpoint

    upstream_bridge.without_packed_attention()
    checkpoint._load_checkpoint_hf = lambda **options: (0, 0)
