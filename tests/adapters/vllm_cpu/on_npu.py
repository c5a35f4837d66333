"""Compare a layer's core on the emulated NPU with the CPU: [name, calls, errors] as JSON.

npu-ops emulate -- python -m vllm_cpu.on_npu

torch_npu is the real one. vLLM builds the metadata; nothing of vllm-ascend is imported.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from npu_ops_adapters.vllm.gated_delta_net import Form, forward_core

from vllm_cpu.checks import Calls
from vllm_cpu.layers import Pools, metadata, run

DRAFTS = [[3, 7, 5], [1, 2, 8]]
STEPS = {
    "decode": (([1, 1, 1], [9, 70, 1], [3, 7, 5]), {"tokens": 4, "graph": True}, [3, 7, 5]),
    "prefill": (([70, 5, 3], [0, 64, 9], [4, 7, 2]), {}, [7, 2]),
    "mixture": (([1, 1, 66], [9, 30, 0], [7, 2, 4]), {}, [7, 2]),
    "verify": (([3, 2], [9, 20], DRAFTS), {"accepted": [2, 3]}, DRAFTS),
    "verify and prefill": (
        ([3, 40, 2], [9, 0, 20], [DRAFTS[0], [4, 0, 0], DRAFTS[1]]), {"accepted": [1, 0, 3]}, DRAFTS
    ),
}  # fmt: skip


def on(device, step, used, form):
    """Run a step on a device; return what it writes, on the CPU."""
    pools = Pools.make(used)
    pools.conv, pools.states = pools.conv.to(device), pools.states.to(device)
    moved = {
        name: x.to(device) for name, x in vars(step).items() if isinstance(x, torch.Tensor)
    }  # fmt: skip
    step = dataclasses.replace(
        step, **{name: x for name, x in moved.items() if name in step.__dataclass_fields__}
    )

    def core(self, **given):
        forward_core(self, **given, form=form)

    with Calls() as counted:
        out = run(core, Layer, pools, step, device=device)
    return counted.found, [x.cpu().float() for x in (out, pools.conv, pools.states)]


class Layer(torch.nn.Module):
    """The attributes of vLLM's layer that the method reads."""


def main():
    for name, (step, options, used) in STEPS.items():
        built = metadata(*step, **options)
        for form in (Form(True, False), Form(False, False)):
            _, wanted = on("cpu", built, used, form)
            called, found = on("npu", built, used, form)
            errors = [
                (one - other).abs().nan_to_num().max().item()
                for one, other in zip(found, wanted, strict=True)
            ]
            assert all(x.isnan().equal(y.isnan()) for x, y in zip(found, wanted, strict=True))
            print(json.dumps([name, called, errors]), flush=True)


if __name__ == "__main__":
    main()
