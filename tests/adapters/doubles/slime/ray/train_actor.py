import ray

from slime.utils import accelerator  # noqa: F401


class TrainRayActor:
    def device(self):
        return ray.get_gpu_ids()[0]
