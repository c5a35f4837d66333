"""Run tests/ops/test_context_parallel.py over HCCL; torchrun runs this with 2 processes."""

import os

import torch
import torch.distributed as dist
from test_context_parallel import CALLS, check_group, check_packed

torch.npu.set_device(int(os.environ["RANK"]))
dist.init_process_group("hccl")
for call in CALLS:
    check_group(call, dist.group.WORLD, "npu")
    check_packed(call, dist.group.WORLD, "npu")
print("as on one rank")
dist.destroy_process_group()
