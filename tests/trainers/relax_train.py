"""Runs Relax's trainer on Ray with rollouts from files, as its actor service would.

python relax_train.py DEVICES ARGUMENTS...

Relax's services on Ray Serve and the queue between them are not started. With --save, the weights
drawn by Megatron are saved and nothing is trained.
"""

from __future__ import annotations

import sys

import relax_worker
import slime_train

MARGIN = 1  # CPUs of Ray beyond the workers': a lock needs one


def main(devices: str, *arguments: str) -> None:
    relax_worker.setup()
    import ray
    from ray.util import placement_group

    count = int(devices)
    ray.init(
        num_cpus=count + MARGIN,
        resources={"NPU": count},
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "relax_worker.setup"},
    )
    args = parse(arguments)
    bundles = placement_group([{"NPU": 1, "CPU": 1}] * count)
    ray.get(bundles.ready())
    train(args, (bundles, list(range(count)), list(range(count))), count)
    ray.shutdown()


def parse(arguments: tuple[str, ...]):
    sys.argv[1:] = arguments
    from relax.backends.megatron import arguments as defaults
    from relax.utils.arguments import parse_args

    slime_train.in_fp32(defaults, "_set_default_megatron_args")
    args = parse_args()
    args.tq_config = None
    return args


def train(args, bundles, count: int) -> None:
    import ray
    from relax.distributed.ray.actor_group import RayTrainGroup

    group = RayTrainGroup(args, count, bundles, num_gpus_per_actor=0.4, runtime_env={})
    ray.get(group.async_init(args, "actor", with_ref=args.use_kl_loss))
    if args.save:
        group.save_model(0, force_sync=True)
        return
    for rollout in range(args.num_rollout):
        ray.get(group.async_train(rollout))


if __name__ == "__main__":
    main(*sys.argv[1:])
