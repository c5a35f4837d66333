"""Start two of slime's trainers on two NPUs of Ray, by slime's code for GPUs; print
their devices."""

import json

import ray

ray.init(
    num_cpus=4, num_gpus=0, resources={"NPU": 2}, include_dashboard=False,
    object_store_memory=80 * 2**20, log_to_driver=False,
)  # fmt: skip

from slime.ray import placement_group  # noqa: E402  (imports torch, and so npu-ops)
from slime.ray.train_actor import TrainRayActor  # noqa: E402

group = placement_group.place(2)
devices = placement_group.devices(group, 2)
trainers = [
    ray.remote(num_gpus=1)(TrainRayActor)
    .options(num_cpus=0.4, num_gpus=0.4, scheduling_strategy=placement_group.inside(group, i))
    .remote()
    for i in range(2)
]
placed = ray.get([trainer.device.remote() for trainer in trainers])
left = ray.available_resources().get("NPU", 0.0)
print(json.dumps({"devices": sorted(devices), "trainers": sorted(placed), "left": left}))
ray.shutdown()
