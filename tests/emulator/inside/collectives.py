"""Every collective of torch.distributed over HCCL; torchrun runs this with 2 or 4 processes."""

import os

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
torch.manual_seed(rank)


def full(size, value):
    return torch.full((size,), float(value), device="npu")


for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32):
    x = torch.arange(6, device="npu").to(dtype) + rank
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), (torch.arange(6) * ranks + ranks * (ranks - 1) // 2).to(dtype))
for op, expected in ((dist.ReduceOp.MAX, ranks - 1), (dist.ReduceOp.MIN, 0),
                     (dist.ReduceOp.AVG, (ranks - 1) / 2)):  # fmt: skip
    x = full(1, rank)
    dist.all_reduce(x, op=op)
    assert x.item() == expected

parts = [full(3, -1) for _ in range(ranks)]
dist.all_gather(parts, full(3, rank))
assert [part[0].item() for part in parts] == list(range(ranks))
flat = full(2 * ranks, -1)
dist.all_gather_into_tensor(flat, full(2, rank))
assert flat.tolist() == [r for r in range(ranks) for _ in range(2)]

out = full(2, -1)
dist.reduce_scatter_tensor(out, torch.arange(2.0 * ranks, device="npu"))
assert out.tolist() == [ranks * 2 * rank, ranks * (2 * rank + 1)]
dist.reduce_scatter(out, [full(2, r) for r in range(ranks)])
assert out.tolist() == [ranks * rank] * 2

x = full(4, rank)
dist.broadcast(x, 1)
assert x.tolist() == [1] * 4
x = full(3, rank)
dist.reduce(x, 0)
assert rank or x.tolist() == [ranks * (ranks - 1) / 2] * 3
dist.scatter(out, [full(2, r) for r in range(ranks)] if rank == 0 else None, src=0)
assert out.tolist() == [rank] * 2

out = full(ranks, -1)
dist.all_to_all_single(out, torch.arange(float(ranks), device="npu") + 10 * rank)
assert out.tolist() == [10 * r + rank for r in range(ranks)]
sends, receives = [rank + 1] * ranks, [r + 1 for r in range(ranks)]
out = full(sum(receives), -1)
dist.all_to_all_single(out, full(sum(sends), rank), receives, sends)
assert out.tolist() == [r for r in range(ranks) for _ in range(r + 1)]
parts = [full(2, -1) for _ in range(ranks)]
dist.all_to_all(parts, [full(2, 10 * rank + r) for r in range(ranks)])
assert [part[0].item() for part in parts] == [10 * r + rank for r in range(ranks)]

if rank == 0:
    dist.send(full(5, 7), 1)
if rank == 1:
    x = full(5, -1)
    dist.recv(x, 0)
    assert x.tolist() == [7] * 5
x = full(3, -1)
ring = [
    dist.P2POp(dist.irecv, x, (rank - 1) % ranks),
    dist.P2POp(dist.isend, full(3, rank), (rank + 1) % ranks),
]
for work in dist.batch_isend_irecv(ring):
    work.wait()
assert x.tolist() == [(rank - 1) % ranks] * 3

objects = [None] * ranks
dist.all_gather_object(objects, {"rank": rank})
assert [o["rank"] for o in objects] == list(range(ranks))
half = dist.new_group(list(range(ranks // 2)))
if rank < ranks // 2:
    x = full(1, 1)
    dist.all_reduce(x, group=half)
    assert x.item() == ranks // 2
dist.all_reduce(full(1 << 20, 1), async_op=True).wait()
dist.barrier()

layer = torch.nn.Linear(8, 4).to("npu")
model = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[rank])
model(torch.randn(5, 8, device="npu")).sum().backward()
gradients = [torch.empty_like(layer.weight) for _ in range(ranks)]
dist.all_gather(gradients, layer.weight.grad)
assert all(torch.equal(g, gradients[0]) for g in gradients)

dist.destroy_process_group()
print("all collectives are right", flush=True)
