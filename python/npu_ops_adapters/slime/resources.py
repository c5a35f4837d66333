"""Asks Ray for NPUs where slime asks for GPUs.

Ray counts NPUs as a resource named NPU. slime asks for GPUs, and on a cluster of NPUs it would wait
forever. If a cluster has GPUs, or `ray start --num-gpus` declared some, slime's requests stay.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from npu_ops_adapters.patching import Patch

_GROUPS = "slime.ray.placement_group"
_OPTIONS = ("ray._common.utils", "ray._private.utils")  # in different versions of Ray


def patches() -> Iterable[Patch]:
    """Patch slime's placement groups, and Ray where it reads num_gpus and assigns devices."""
    yield _patch(f"{_GROUPS}:placement_group", _place, why_not=_takes_bundles)
    yield _patch(f"{_GROUPS}:InfoActor", _ask_device, why_not=_is_an_actor)
    if "slime.ray" not in sys.modules:
        return  # Ray itself is patched only in slime's processes
    for module in _OPTIONS:
        if hasattr(sys.modules.get(module), "resources_from_ray_options"):
            target = f"{module}:resources_from_ray_options"
            yield _patch(target, _ask, signatures=(("options_dict",),))
    yield _patch("ray:get_gpu_ids", _ids, signatures=((),))


def _patch(target: str, make: Callable, signatures=(), why_not=None) -> Patch:
    return Patch(
        target=target,
        op="slime_ray",
        make=make,
        why="slime asks Ray for GPUs, and for their ids",
        signatures=signatures,
        versions="slime 624b824a, Ray 2.55 to 2.60",
        remove_when="slime asks Ray for NPUs",
        rebind=False,
        why_not=why_not,
    )


def _takes_bundles(function: Callable) -> str | None:
    first = next(iter(inspect.signature(function).parameters), None)
    return None if first == "bundles" else f"its first parameter: got {first}, needs bundles"


def _is_an_actor(found: Any) -> str | None:
    if not hasattr(found.__ray_metadata__.modified_class, "get_ip_and_gpu_id"):
        return "it has no get_ip_and_gpu_id"
    asked = (found._default_options or {}).get("num_gpus")  # None with slime's NPU patch
    return None if asked == 1 else f"num_gpus: got {asked}, needs 1"


def of_npus(resources: Mapping[str, float]) -> dict[str, float]:
    """Return `resources` with NPUs in place of GPUs if the cluster has NPUs and no GPUs."""
    asked = dict(resources)
    if asked.get("GPU"):
        ray = sys.modules["ray"]
        if not ray.is_initialized():
            ray.init()  # as Ray itself does in its next call
        total = ray.cluster_resources()
        if total.get("NPU") and not total.get("GPU"):
            asked["NPU"] = asked.get("NPU", 0) + asked.pop("GPU")
    return asked


def _place(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_placement_group(bundles, *args, **kwargs):
        return original([of_npus(bundle) for bundle in bundles], *args, **kwargs)

    return npu_ops_placement_group


def _ask(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_resources(options_dict):
        return of_npus(original(options_dict))

    return npu_ops_resources


def _ids(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_get_gpu_ids():
        return original() or _npu_ids()

    return npu_ops_get_gpu_ids


def _npu_ids() -> list[int]:
    assigned = sys.modules["ray"].get_runtime_context().get_accelerator_ids()
    return [int(device) for device in assigned.get("NPU", ())]


class DeviceOfBundle:
    """Replaces slime's InfoActor: returns the node's address and the id of its GPU or NPU.

    Ray runs a copy of this class in a process that imports neither slime nor torch. No patch is
    applied there.
    """

    def get_ip_and_gpu_id(self):
        ray = sys.modules["ray"]
        return ray.util.get_node_ip_address(), (ray.get_gpu_ids() or _npu_ids())[0]


def _ask_device(original: Any) -> Any:
    return sys.modules["ray"].remote(num_gpus=1)(DeviceOfBundle)
