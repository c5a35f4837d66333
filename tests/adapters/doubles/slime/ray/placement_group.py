"""Asks Ray for GPUs and for their ids, as slime's module does."""

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.utils import accelerator  # noqa: F401  (imports torch, and so npu-ops)


@ray.remote(num_gpus=1)
class InfoActor:
    def get_ip_and_gpu_id(self):
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()[0]


def place(number):
    group = placement_group([{"GPU": 1, "CPU": 1}] * number, strategy="PACK")
    if not ray.wait([group.ready()], timeout=20)[0]:
        raise TimeoutError(f"no place; the cluster has {ray.cluster_resources()}")
    return group


def inside(group, index):
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def devices(group, number):
    actors = [
        InfoActor.options(scheduling_strategy=inside(group, i)).remote() for i in range(number)
    ]
    found = ray.get([actor.get_ip_and_gpu_id.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return [device for _, device in found]
