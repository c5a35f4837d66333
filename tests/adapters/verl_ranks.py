"""Compare attention and Gated Delta Net with verl's Ulysses on two gloo ranks with one rank.

python verl_ranks.py STORE RANK    in two processes

Prints the largest error of outputs and gradients, relative to the largest number of each, and the
refused calls.
"""

from __future__ import annotations

import json
import sys
import types

import npu_ops_adapters
import torch
import torch.distributed as dist
from transformers import Qwen3_5TextConfig, Qwen3VLTextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from verl.models.transformers import qwen3_5 as verl_qwen3_5
from verl.utils import ulysses

LENGTHS = (7, 11, 1, 13)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
RANKS, WIDTH = 2, 16
CAUSAL = types.SimpleNamespace(is_causal=True)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def span(x, tokens: int):
    """Return this rank's part of all tokens."""
    return x.chunk(RANKS, dim=tokens)[dist.get_rank()]


def error(actual, expected) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def attention(heads: int, key_heads: int, mask) -> dict[str, float]:
    """Return the errors of this rank's outputs and gradients; key heads may be fewer than ranks."""
    shapes = (heads, key_heads, key_heads)
    whole = [rows(1, n, sum(LENGTHS), WIDTH).requires_grad_() for n in shapes]
    mine = [span(x.detach(), 2).clone().requires_grad_() for x in whole]
    chain = rows(1, sum(LENGTHS), heads, WIDTH)
    ulysses.set_ulysses_sequence_parallel_group(None)
    call = ALL_ATTENTION_FUNCTIONS["npu_ops"]
    expected, _ = call(CAUSAL, *whole, None, cu_seq_lens_q=STARTS.int())
    expected.backward(chain)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    actual, _ = call(CAUSAL, *mine, mask, position_ids=span(POSITIONS, 1))
    actual.backward(span(chain, 1))
    found = {"output": error(actual, span(expected, 1))}
    for name, a, b in zip("qkv", mine, whole, strict=True):
        found[name] = error(a.grad, span(b.grad, 2))
    return found


def layer():
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=32, num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=WIDTH, linear_value_head_dim=WIDTH, vocab_size=8,
    )  # fmt: skip
    return qwen3_5.Qwen3_5GatedDeltaNet(config, 0)


def gradients(module, hidden) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters()} | {"hidden": hidden.grad}


def whole_delta_net(hidden, chain):
    """Run transformers' own layer, one sequence at a time; return outputs and gradients."""
    module, hidden = layer(), hidden.clone().requires_grad_()
    outs = [module(hidden[:, a:b]) for a, b in zip(STARTS[:-1], STARTS[1:], strict=True)]
    out = torch.cat(outs, dim=1)
    out.backward(chain)
    return {"output": out.detach()} | gradients(module, hidden)


def packed_delta_net(hidden, chain):
    module, hidden = layer(), hidden.clone().requires_grad_()
    forward = verl_qwen3_5.qwen3_5_gated_delta_net_forward
    out = forward(module, hidden, cu_seqlens=STARTS, cu_seqlens_cpu=STARTS)
    out.backward(chain)
    return {"output": out.detach()} | gradients(module, hidden)


def delta_net() -> dict[str, dict[str, float]]:
    """Return the errors on one rank and on two; parameters' gradients are summed
    over both ranks."""
    hidden, chain = rows(1, sum(LENGTHS), 32), rows(1, sum(LENGTHS), 32) + 1
    npu_ops_adapters.revert()
    expected = whole_delta_net(hidden, chain)
    npu_ops_adapters.apply()
    ulysses.set_ulysses_sequence_parallel_group(None)
    alone = packed_delta_net(hidden, chain)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    spread = packed_delta_net(span(hidden, 1), span(chain, 1))
    found = {"alone": {name: error(alone[name], expected[name]) for name in expected}, "spread": {}}
    for name, value in spread.items():
        if name in ("output", "hidden"):
            found["spread"][name] = error(value, span(expected[name], 1))
        else:
            dist.all_reduce(value)
            found["spread"][name] = error(value, expected[name])
    return found


def text_model(spread: bool, axes: int):
    """Run Qwen3-VL's text model on 24 tokens, two sequences, with positions of `axes` rows."""
    torch.manual_seed(0)
    config = Qwen3VLTextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=8, attn_implementation="npu_ops",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    )  # fmt: skip
    model = qwen3_vl.Qwen3VLTextModel(config)
    positions = torch.cat([torch.arange(n) for n in (17, 7)]).expand(axes, 1, 24)
    hidden = rows(1, 24, 64)
    if spread:
        hidden, positions = span(hidden, 1), span(positions, 2)
    hidden = hidden.clone().requires_grad_()
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD if spread else None)
    out = model(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    out.sum(0).square().sum().backward()
    return {"output": out.detach(), "hidden": hidden.grad}


def qwen3_vl_text() -> dict[str, float]:
    expected, actual = text_model(False, axes=4), text_model(True, axes=4)
    return {name: error(actual[name], span(expected[name], 1)) for name in actual}


def refusals() -> dict[str, str]:
    """Return the refusals of calls that would only see this rank's part."""
    q, k, v = (rows(1, 4, sum(LENGTHS) // RANKS, WIDTH) for _ in range(3))
    mask = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool)
    call, given = ALL_ATTENTION_FUNCTIONS["npu_ops"], {"position_ids": span(POSITIONS, 1)}
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    gates = rows(1, q.shape[2], 4), rows(1, q.shape[2], 4)
    calls = {
        "mask": lambda: call(CAUSAL, q, k, v, mask, **given),
        "sinks": lambda: call(CAUSAL, q, k, v, None, s_aux=rows(4), **given),
        "cache": lambda: call(CAUSAL, q, k, v, None, cache=object(), **given),
        "no text positions": lambda: text_model(True, axes=3),
        "positions of three axes": lambda: call(
            CAUSAL, q, k, v, None, position_ids=span(POSITIONS, 1).expand(3, 1, -1)
        ),
        "delta rule": lambda: qwen3_next.torch_chunk_gated_delta_rule(*heads, *gates),
    }
    found = {}
    for name, refused in calls.items():
        try:
            refused()
            found[name] = "not refused"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def main() -> None:
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    npu_ops_adapters.apply()
    local = span(POSITIONS, 1)[0]
    number = torch.cat((torch.zeros(1), (local.diff() != 1).cumsum(0)))
    mask = (number[:, None] == number).tril()[None, None]
    sys.modules["npu_ops_adapters.transformers.attention"]._note_packing(mask)
    found = {
        "fewer key heads": attention(4, 2, mask),
        "fewer key heads than ranks": attention(4, 1, None),
        "Qwen3-VL's text model": qwen3_vl_text(),
        **delta_net(),
    }
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    print(json.dumps({"errors": found, "refused": refusals()}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
