"""Run slime of August 2026 on CPUs, with rollouts from files, as the reference.

python slime_newest.py DEVICES ARGUMENTS...

slime_train.py explains the environment variables.
"""

from __future__ import annotations

import functools
import os
import re
import sys

import slime_delta_net
import slime_doubles
import slime_train
import slime_worker
import torch


def main(devices: str, *arguments: str) -> None:
    setup()
    slime_train.start("slime_newest.setup", "GPU", int(devices))
    sys.argv[1:] = arguments
    import train
    from slime.backends.megatron_utils import arguments as defaults

    slime_train.in_fp32(defaults, "_set_default_megatron_args")
    train.train(train.parse_args())


def setup() -> None:
    """Set up each of Ray's workers, and their driver."""
    slime_doubles.install()
    on_cpu()
    slime_worker.for_newer_torch()
    slime_worker.record("slime.observability")


def on_cpu() -> None:
    """Register a CPU accelerator in slime, and read Megatron-LM's "cuda" as "cpu"."""
    slime_doubles.install(slime_delta_net.MODULES)
    if os.environ.get("SLIME_BRIDGE"):
        slime_worker.with_bare_bridge()
    slime_worker.read_on_cpu()
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class CPU(TorchAccelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def _module(self):
            return torch.cpu

        def device_name(self, index=None):
            return "cpu"

        def current_device(self):
            return "cpu"

    accelerator.register_accelerator("cpu", CPU, communication_backends=("gloo",))


def with_odd_lengths() -> None:
    """Do not cut sequences on one rank: slime's Qwen3.5-VL cuts them for context parallelism."""
    from slime_plugins.models import qwen3_5_vl

    cut = qwen3_5_vl.get_packed_cp_local_indices

    def indices(ends, size: int, rank: int, device):
        if size > 1:
            return cut(ends, size, rank, device)
        return torch.arange(int(ends[-1]), device=device)

    qwen3_5_vl.get_packed_cp_local_indices = indices


def with_local_layers(args) -> None:
    """For --custom-megatron-init-path: use Megatron's own modules.

    slime's loaders of Hugging Face checkpoints expect Transformer Engine's weight names, so names
    are mapped.
    """
    from slime.backends.megatron_utils import hf_to_megatron

    slime_worker.with_local_layers(args)
    slime_worker.norm_once("qwen3_5")
    with_odd_lengths()
    norms_from_zero()
    loaders = hf_to_megatron._LOADERS
    loaders |= {kind: functools.partial(with_local_names, load) for kind, load in loaders.items()}


def with_local_names(load, name: str, *source):
    """Map the name of attention's norm, which Transformer Engine fuses into the projection."""
    fused = r"\1self_attention.linear_qkv.layer_norm_weight"
    return load(re.sub(r"(layers\.\d+\.)input_layernorm\.weight", fused, name), *source)


def norms_from_zero() -> None:
    """Let Megatron's RMSNorm from PyTorch multiply by 1 + weight, an option that it lacks."""
    from megatron.core.transformer import torch_norm

    plain = torch_norm.WrappedTorchNorm.__new__

    def norm(cls, config, hidden_size, eps, **options):
        if not config.layernorm_zero_centered_gamma:
            return plain(cls, config, hidden_size, eps, **options)
        return FromZero(hidden_size, eps)

    torch_norm.WrappedTorchNorm.__new__ = norm


class FromZero(torch.nn.RMSNorm):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


if __name__ == "__main__":
    main(*sys.argv[1:])
