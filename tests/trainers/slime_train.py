"""slime's own train.py on Ray, on rollouts that a test wrote.

python slime_train.py DEVICES ARGUMENTS...

The environment says who computes: SLIME_WHO is "shipped", "npu_ops" or "truth", and SLIME_RESULTS
the folder in which slime_worker.py writes.
"""

from __future__ import annotations

import os
import sys

import slime_worker


def main(devices: str, *arguments: str) -> None:
    slime_worker.setup()
    import ray

    on_cpu = os.environ["SLIME_WHO"] == "truth"
    ray.init(
        num_cpus=int(devices) + 2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "slime_worker.setup"},
        **({"num_gpus": int(devices)} if on_cpu else {"resources": {"NPU": int(devices)}}),
    )
    sys.argv[1:] = arguments
    import train
    from slime.backends.megatron_utils import arguments as defaults

    in_fp32(defaults)
    train.train(train.parse_args())
    ray.shutdown()


def in_fp32(defaults, name: str = "set_default_megatron_args") -> None:
    """slime and Relax train in bf16 or fp16 alone, whose rounding would hide what differs."""
    set_defaults = getattr(defaults, name)

    def set_fp32(args):
        args = set_defaults(args)
        args.bf16 = False
        return args

    setattr(defaults, name, set_fp32)


if __name__ == "__main__":
    main(*sys.argv[1:])
