"""Compare Megatron's core attention with context parallelism, on gloo ranks, with one rank.

python cp_ranks.py STORE RANK RANKS    in a process for each rank

Prints for each case: the largest error of the output and of each gradient, divided by the largest
absolute value of that tensor, and the number of calls to `npu_ops.attention`.
"""

from __future__ import annotations

import json
import sys
import types
from unittest import mock

import megatron_cpu
import torch
import torch.distributed as dist

import npu_ops

# Lengths of packed sequences: multiples of 8, so that up to four ranks can share each.
LENGTHS = (32, 64, 16, 80)
LENGTH = 48


def attention(group, kind, **config):
    """Build Megatron's core attention by npu-ops; group: the ranks that share sequences."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from npu_ops_adapters.megatron import attention as adapter

    ranks = group.size() if group else 1
    config = megatron_cpu.transformer_config("rope", context_parallel_size=ranks, **config)
    collection = types.SimpleNamespace(cp=group, tp=None)
    module = adapter.npuify(DotProductAttention)
    return module(config, 1, kind, "self", pg_collection=collection)


def dealt(starts: list[int], rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's tokens: chunks `rank` and 2 * ranks - 1 - rank of each sequence."""
    found = []
    for start, stop in zip(starts, starts[1:], strict=False):
        chunks = torch.arange(start, stop).chunk(2 * ranks)
        found += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.cat(found)


def rows(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(module, tensors, mask, grad, **more):
    tensors = [x.clone().requires_grad_() for x in tensors]
    out = module(*tensors, mask, **more)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in tensors)]


def errors(case, rank, ranks) -> dict[str, float]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    kind, packed, mask = case
    starts = [0, LENGTH]
    middle, packing = (2,), {}
    if packed:
        starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
        lengths = torch.tensor(starts, dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        middle, packing = (), {"packed_seq_params": params}
    own = dealt(starts, rank, ranks)
    q, k, v = (rows(starts[-1], *middle, n, 16, seed=n + s) for n, s in ((4, 0), (2, 1), (2, 2)))
    grad = rows(starts[-1], *middle, 64, seed=9)
    kind = AttnMaskType[kind]
    alone, shared = attention(None, kind), attention(dist.group.WORLD, kind)
    masks = MASKS[mask]() if mask else None
    part = None if masks is None else masks[..., own, :]
    wanted = step(alone, (q, k, v), masks, grad, **packing)
    with mock.patch.object(npu_ops, "attention", wraps=npu_ops.attention) as called:
        found = step(shared, [x[own] for x in (q, k, v)], part, grad[own], **packing)
    values = {
        name: ((a - b[own]).abs().max() / b.abs().max()).item()
        for name, a, b in zip(("out", "q", "k", "v"), found, wanted, strict=True)
    }
    return values | {"calls": called.call_count}


def causal():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]


def scattered():
    return (rows(2, 1, LENGTH, LENGTH, seed=4) > 0.5) & ~torch.eye(LENGTH, dtype=torch.bool)


MASKS = {"causal": causal, "scattered": scattered}
CASES = {
    "causal": ("causal", False, None),
    "causal mask": ("causal", False, "causal"),
    "any mask": ("padding", False, "scattered"),
    "no mask": ("no_mask", False, None),
    "packed causal": ("padding_causal", True, None),
    "packed, no mask": ("padding", True, None),
}


def main() -> None:
    store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    megatron_cpu.start(dist.FileStore(store, ranks), rank, ranks)
    print(json.dumps({name: errors(case, rank, ranks) for name, case in CASES.items()}))
    dist.barrier()


if __name__ == "__main__":
    main()
