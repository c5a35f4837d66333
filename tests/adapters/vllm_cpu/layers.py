"""A Gated Delta Net layer of vLLM, its pools, and steps from vLLM's own metadata builder."""

from __future__ import annotations

import dataclasses
import sys
import types

import torch

from vllm_cpu.versions import OLDER

HEADS, VALUE_HEADS, DIM, WIDTH, DRAFTED = 2, 4, 32, 4, 2
CHANNELS = (2 * HEADS + VALUE_HEADS) * DIM
SLOTS, MOST = 12, 100  # slots of the pools, and most tokens of a step
PREFIX = "model.layers.0.linear_attn"


def rows(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclasses.dataclass
class Pools:
    """conv `[slots, W - 1 + drafted, D]` and states `[slots, HV, ..]`; unused slots are NaN."""

    conv: torch.Tensor
    states: torch.Tensor

    @classmethod
    def make(cls, used, dtype=torch.float32):
        conv = torch.full((SLOTS, WIDTH - 1 + DRAFTED, CHANNELS), torch.nan, dtype=torch.float16)
        states = torch.full((SLOTS, VALUE_HEADS, DIM, DIM), torch.nan, dtype=dtype)
        used = torch.tensor(used, dtype=torch.int64).flatten()
        conv[used] = rows(len(used), *conv.shape[1:], seed=1)
        states[used] = rows(len(used), *states.shape[1:], dtype=dtype, seed=2) / 8
        return cls(conv, states)

    def copy(self):
        return Pools(self.conv.clone(), self.states.clone())


def layer(cls, pools: Pools):
    """Return an instance of vLLM's class, without its projections."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    device = pools.conv.device
    weight = rows(CHANNELS, 1, WIDTH, seed=3).to(device) / 2
    vars(made).update(
        prefix=PREFIX, activation="silu", tp_size=1, head_k_dim=DIM, head_v_dim=DIM,
        key_dim=HEADS * DIM, value_dim=VALUE_HEADS * DIM,
        conv1d=types.SimpleNamespace(weight=weight, bias=None),
        A_log=rows(VALUE_HEADS, seed=4).to(device), dt_bias=rows(VALUE_HEADS, seed=5).to(device),
        kv_cache=[(pools.conv, pools.states)] if OLDER else (pools.conv, pools.states),
    )  # fmt: skip
    return made


def builder(drafts: bool = False, graph: bool = False):
    """Return vLLM's builder of this layer's metadata, or vllm-ascend's where that is imported.

    vllm-ascend 0.18.0 patches vLLM's, 0.23.0 has its own.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    ascend = sys.modules.get("vllm_ascend.ops.gdn_attn_builder")
    made = getattr(ascend, "AscendGDNAttentionMetadataBuilder", GDNAttentionMetadataBuilder)
    space = types.SimpleNamespace
    config = space(
        compilation_config=space(
            cudagraph_mode=space(has_full_cudagraphs=lambda: graph), max_cudagraph_capture_size=None
        ),
        speculative_config=space(num_speculative_tokens=DRAFTED, parallel_drafting=False)
        if drafts
        else None,
        scheduler_config=space(max_num_seqs=8, max_num_batched_tokens=512),
        cache_config=space(mamba_cache_mode="none"),
        parallel_config=space(decode_context_parallel_size=1, tensor_parallel_size=1),
        model_config=space(hf_text_config=space(linear_num_value_heads=VALUE_HEADS)),
        additional_config={},
    )
    spec = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float16,))
    return made(spec, [PREFIX], config, torch.device("cpu"))


def metadata(lengths, seen, slots, *, tokens=None, accepted=None, graph=False, by=None):
    """Return the metadata of a step. lengths: new tokens of each sequence. seen: tokens before
    them.

    slots: one per sequence, or with drafted tokens a row of DRAFTED + 1.
    tokens: their number with a graph's padding.
    accepted: numbers from the last step; 0 for a sequence without drafts.
    by: a builder, whose buffers a graph reads; the default is a new one.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    table = torch.tensor(slots, dtype=torch.int32)
    table = table[:, None] if table.dim() == 1 else table
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ends = torch.tensor([m + n for m, n in zip(lengths, seen, strict=True)])
    prompts = torch.tensor([n > 1 for n in lengths]) & ~torch.tensor(accepted or [0]).bool()
    since_0_23 = {} if OLDER else {"is_prefilling": prompts, "seq_lens_cpu_upper_bound": ends}
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=ends, **since_0_23,
        num_reqs=len(lengths), num_actual_tokens=tokens or sum(lengths),
        max_query_len=max(lengths), max_seq_len=512, block_table_tensor=table,
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
    )  # fmt: skip
    if accepted is None:
        return (by or builder(graph=graph)).build(0, common)
    drafting = torch.tensor([n - 1 if m else -1 for n, m in zip(lengths, accepted, strict=True)])
    counts = torch.tensor(accepted, dtype=torch.int32).clamp(min=1)
    return (by or builder(True, graph)).build(0, common, counts, drafting.int())


def run(core, cls, pools: Pools, step, device="cpu", skip=0):
    """Run a method; return core_attn_out `[T, HV, V]`. skip: tokens of earlier steps."""
    from vllm.forward_context import override_forward_context

    tokens = step.num_actual_tokens
    out = torch.full((tokens + 1, VALUE_HEADS, DIM), 7.0, dtype=torch.float16, device=device)
    x = rows(MOST, CHANNELS, seed=6)[skip : skip + tokens + 1].to(device)
    b, a = (rows(MOST, VALUE_HEADS, seed=s)[skip : skip + tokens + 1].to(device) for s in (8, 9))
    context = types.SimpleNamespace(attn_metadata={PREFIX: step}, virtual_engine=0)
    with override_forward_context(context), torch.no_grad():
        core(layer(cls, pools), mixed_qkv=x, b=b, a=a, core_attn_out=out)
    assert out[tokens:].eq(7).all()  # past this step's tokens
    return out[:tokens]
