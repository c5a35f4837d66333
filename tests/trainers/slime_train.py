"""Run slime's own train.py on Ray, with rollouts from files or from SGLang's engine.

python slime_train.py DEVICES ARGUMENTS...

Environment:

- SLIME_WHO: "shipped", slime with its NPU patches; "engine", slime with npu-ops and with SGLang's
  engine as rollout; "npu_ops", with npu-ops; or "truth", the reference on the CPU.
- SLIME_RESULTS: the folder to which slime_worker.py writes.
- SLIME_SOURCES: folders of slime and Megatron-LM, where "truth" reads "cuda" as "cpu".
- SLIME_BRIDGE: the folder of Megatron-Bridge.
- SLIME_ENGINE: set if SGLang's engine generates the rollouts.
- SLIME_WHOLE_BRIDGE, SLIME_MINDSPEED_FIRST: see `slime_worker.with_slimes_patches`.
- SLIME_STOCK, SLIME_DTYPE: for slime_site/sitecustomize.py, which prepares unchanged trainers.
"""

from __future__ import annotations

import os
import sys

import slime_worker


def main(devices: str, *arguments: str) -> None:
    slime_worker.setup()
    start("slime_worker.setup", "NPU", int(devices))
    sys.argv[1:] = arguments
    import train
    from slime.backends.megatron_utils import arguments as defaults

    in_fp32(defaults)
    train.train(train.parse_args())


def start(setup: str, device: str, count: int) -> None:
    """Start Ray with `count` of the devices that slime asks for; its workers first call `setup`."""
    import ray

    gpus = device == "GPU" or os.environ["SLIME_WHO"] == "truth"
    ray.init(
        num_cpus=count + 2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": setup},
        **({"num_gpus": count} if gpus else {"resources": {device: count}}),
    )


def in_fp32(defaults, name: str = "set_default_megatron_args") -> None:
    """Train in fp32: slime and Relax offer only bf16 and fp16, whose rounding hides differences."""
    set_defaults = getattr(defaults, name)

    def set_fp32(args):
        args = set_defaults(args)
        args.bf16 = False
        return args

    setattr(defaults, name, set_fp32)


if __name__ == "__main__":
    main(*sys.argv[1:])
