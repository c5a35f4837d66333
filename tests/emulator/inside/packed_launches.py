"""Print as JSON how many kernels the chunked gated delta rule launches for packed sequences."""

import json

import torch
from npu_ops_tools import launches

import npu_ops

LENGTHS = torch.tensor([0, 100, 180, 300], dtype=torch.int32).npu()


def tokens(*shape):
    return torch.randn(1, 300, *shape).npu()


torch.manual_seed(0)
q, v, g, beta = tokens(2, 64).requires_grad_(), tokens(4, 64), -tokens(4).abs(), tokens(4).sigmoid()


def forward():
    return npu_ops.chunk_gated_delta_rule(q, q, v, g, beta, cu_seqlens=LENGTHS)[0]


o = forward()
grad = torch.ones_like(o)
runs = {"forward": forward, "backward": lambda: o.backward(grad)}
nothing = torch.nn.Identity()
print(json.dumps({name: launches.count(name, nothing, run).total for name, run in runs.items()}))
