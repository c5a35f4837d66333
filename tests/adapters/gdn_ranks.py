"""Compare Gated Delta Net on two ranks with the same layer on one, with gloo.

python gdn_ranks.py STORE RANK    in two processes

Each rank builds the whole layer in a group of its own, and its share of the layer, cut from the
same weights: half of the heads, or half of the tokens. Prints the largest error of outputs and
gradients, relative to the largest number of each, and the operators of npu-ops that a step calls.
"""

from __future__ import annotations

import json
import sys
import types

import megatron_cpu
import torch
import torch.distributed as dist
from cp_ranks import dealt
from npu_ops_tools import demo_model

# rows of in_proj: q, k, v, gate, beta, alpha; conv1d has the first 3
SECTIONS = (64, 64, 128, 128, 4, 4)


def layer(tensor: bool = False, context: bool = False):
    """Build the layer: whole on each rank, or split by heads (`tensor`) or tokens (`context`)."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = megatron_cpu.transformer_config("rope", **demo_model.HYBRID)
    spec = demo_model.gated_delta_net(get_gpt_layer_local_spec(normalization="RMSNorm"))
    spec = spec.submodules.self_attention
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tp, cp = (dist.group.WORLD if shared else alone for shared in (tensor, context))
    groups = types.SimpleNamespace(tp=tp, cp=cp)
    return spec.module(config, spec.submodules, layer_number=1, pg_collection=groups)


def cut(name: str, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's half: of each section of rows, or of out_proj's columns. Norms stay whole."""
    if name.startswith("out_norm"):
        return weight
    if name.startswith("out_proj"):
        return weight.chunk(2, 1)[rank]
    if name.startswith(("in_proj", "conv1d")):
        rows = weight.split(SECTIONS if name.startswith("in_proj") else SECTIONS[:3])
        return torch.cat([section.chunk(2)[rank] for section in rows])
    return weight.chunk(2)[rank]


def step(module, hidden, **packing):
    hidden = hidden.clone().requires_grad_()
    out, _ = module(hidden, None, **packing)
    module.zero_grad()
    out.square().sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()}
    return {"output": out.detach(), "hidden": hidden.grad} | found


def randomise(module) -> None:
    """Draw weights as large as trained ones, and slow decays, so that all gradients matter."""
    for name, p in module.named_parameters():
        p.normal_(std=p[0].numel() ** -0.5 if p.dim() > 1 else 0.5)
        p += {"A_log": -2, "out_norm.weight": 1}.get(name, 0)


@torch.no_grad()
def layers(rank: int):
    torch.manual_seed(0)
    whole, shared, spread = layer(), layer(tensor=True), layer(context=True)
    randomise(whole)
    spread.load_state_dict(whole.state_dict())
    weights = dict(whole.named_parameters())
    for name, p in shared.named_parameters():
        p.copy_(cut(name, weights[name], rank))
    return whole, shared, spread


def errors(rank: int, whole, shared, hidden, **packing) -> dict[str, float]:
    expected, actual = step(whole, hidden, **packing), step(shared, hidden, **packing)
    dist.all_reduce(actual["out_norm.weight"])  # each rank has its heads' part of the gradient
    found = {}
    for name, value in actual.items():
        wanted = expected[name]
        wanted = wanted if name in ("output", "hidden") else cut(name, wanted, rank)
        found[name] = ((value - wanted).abs().max() / wanted.abs().max()).item()
    return found


def context_errors(rank: int, whole, spread, hidden, starts=(), **packing) -> dict[str, float]:
    """Compare a layer split by tokens; a rank has two of each sequence's four chunks."""
    own = dealt(starts or [0, len(hidden)], rank, 2)
    expected, actual = step(whole, hidden, **packing), step(spread, hidden[own], **packing)
    found = {}
    for name, value in actual.items():
        if name in ("output", "hidden"):
            wanted = expected[name][own]
        else:
            wanted = expected[name]
            dist.all_reduce(value)
        found[name] = ((value - wanted).abs().max() / wanted.abs().max()).item()
    return found


def main() -> None:
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    megatron_cpu.start(dist.FileStore(store, 2), rank, 2)
    from megatron.core.packed_seq_params import PackedSeqParams

    whole, shared, spread = layers(rank)
    hidden = torch.randn(80, 1, 64, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 7, 77, 80], dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    with demo_model.Counter() as counter:
        found = {"plain": errors(rank, whole, shared, hidden)}
    try:
        found["packed"] = errors(rank, whole, shared, hidden, packed_seq_params=packing)
    except NotImplementedError:
        found["packed"] = "refused"  # Megatron up to 0.17 rejects them
    calls = {"plain": counter.calls}
    if hasattr(whole, "cp_size"):
        starts = [0, 16, 64, 80]
        lengths = torch.tensor(starts, dtype=torch.int32)
        packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        with demo_model.Counter() as counter:
            found["context"] = context_errors(rank, whole, spread, hidden)
            found["packed context"] = context_errors(
                rank, whole, spread, hidden, starts, packed_seq_params=packing
            )
        calls["context"] = counter.calls
    print(json.dumps({"errors": found, "calls": calls}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
