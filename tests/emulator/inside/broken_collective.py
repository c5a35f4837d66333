"""Start two ranks; rank 1 kills itself or passes a tensor of another size to all_reduce."""

import os
import signal
import socket
import subprocess
import sys

fault = sys.argv[1]
if "RANK" not in os.environ:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, fault], env=os.environ | {"RANK": str(rank)})
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() != 0 for rank in ranks))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.ones(3, device="npu")
dist.all_reduce(x)
torch.npu.synchronize()
if rank == 1 and fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x if rank == 0 else torch.ones(4, device="npu"))
torch.npu.synchronize()
