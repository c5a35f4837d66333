"""Check each function that the adapter replaces against vllm-ascend's own, and calls left to it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import types
from unittest import mock

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from npu_ops.core import env
from vllm_cpu.checks import Calls, as_it_was, both, close, own_chunked, states
from vllm_cpu.layers import (
    CHANNELS,
    DIM,
    HEADS,
    VALUE_HEADS,
    WIDTH,
    Pools,
    metadata,
    rows,
    run,
)
from vllm_cpu.versions import CORES, OLDER, only

TRITON = "vllm_ascend.ops.triton"
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def pair(dotted):
    """Return our function, which is in place, and vllm-ascend's."""
    ours = pkgutil.resolve_name(dotted)
    return ours, ours.__wrapped__


def starts_of(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def heads(tokens):
    """Return q, k, v of packed tokens, g and beta."""
    q, k = (rows(1, tokens, HEADS, DIM, seed=seed) for seed in (1, 2))
    v, a, b = rows(1, tokens, VALUE_HEADS, DIM, seed=3), *rows(2, tokens, VALUE_HEADS, seed=4)
    return q, k, v, -a.float().abs()[None] / 4, b.sigmoid()[None]


@check
@only("0.18.0")
def the_convolution_of_a_prefill():
    home = f"{TRITON}.mamba.causal_conv1d"
    ours, theirs = pair(f"{home}.causal_conv1d_fn")
    weight, starts, slots = (
        rows(CHANNELS, WIDTH, seed=3),
        starts_of(9, 2, 5),
        torch.tensor([3, 1, 6]),
    )
    begun = torch.tensor([True, True, True])
    call = (rows(CHANNELS, 16), weight, rows(CHANNELS, seed=4), "silu")
    pools = [Pools.make([3, 1, 6]).conv.transpose(1, 2) for _ in range(2)]
    with Calls() as counted:
        y = ours(*call, pools[0], begun, slots, starts)
    assert counted.found == ["causal_conv1d"]
    alone = types.SimpleNamespace(world_size=1)
    with in_a_step(None), mock.patch(f"{home}.get_pcp_group", lambda: alone):
        close(y, theirs(*call, pools[1], begun, slots, starts))
    close(*pools, 0)


@contextlib.contextmanager
def in_a_step(step):
    context = importlib.import_module("vllm.forward_context")
    with context.override_forward_context(types.SimpleNamespace(attn_metadata=step)):
        yield


@check
@only("0.18.0")
def a_new_sequence_does_not_begin_with_what_its_slot_had():
    """vllm-ascend 0.18.0 starts from the slot's old contents."""
    ours, _ = pair(f"{TRITON}.mamba.causal_conv1d.causal_conv1d_fn")
    call = (rows(CHANNELS, 7), rows(CHANNELS, WIDTH, seed=3), None, "silu")
    pools = [torch.zeros(4, CHANNELS, WIDTH - 1).half(), rows(4, CHANNELS, WIDTH - 1)]
    slots = (torch.tensor([False]), torch.tensor([2]), starts_of(7))
    one, other = (ours(*call, pool, *slots) for pool in pools)
    assert one.equal(other) and pools[0][2].equal(pools[1][2])


@check
def the_convolution_of_new_tokens():
    ours, theirs = pair(f"{TRITON}.mamba.causal_conv1d.causal_conv1d_update_npu")
    weight, bias = rows(CHANNELS, WIDTH, seed=3), rows(CHANNELS, seed=4)
    slots = torch.tensor([3, 1, -1, 6], dtype=torch.int32)
    accepted, starts = torch.tensor([1, 3, 1, 2], dtype=torch.int32), starts_of(3, 2, 0, 1)
    verify = {"num_accepted_tokens": accepted, "query_start_loc": starts, "max_query_len": 3}
    for x, options in ((rows(4, CHANNELS), {}), (rows(6, CHANNELS), verify)):
        pools = [Pools.make([3, 1, 6]).conv.transpose(1, 2) for _ in range(2)]
        call = (weight, bias, True)
        with Calls() as counted:
            y = ours(x, pools[0], *call, slots, **options)
        assert counted.found == ["causal_conv1d_update"]
        right = theirs(x.clone(), pools[1], *call, slots, **options)
        real = slice(None) if options else slots >= 0  # padding rows hold x
        close(y[real], right[real])
        close(*pools, 0)


@check
def the_rule_of_a_prefill():
    ours, _ = pair(f"{TRITON}.fla.chunk.chunk_gated_delta_rule")
    call, state = heads(75), rows(2, VALUE_HEADS, DIM, DIM, seed=8) / 8
    options = {
        "initial_state": state, "output_final_state": True, "cu_seqlens": starts_of(70, 5),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    with Calls() as counted:
        o, after = ours(*call, prebuilt_meta=object(), **options)
    assert counted.found == ["chunk_gated_delta_rule"] and after.dtype == torch.float32
    right, last = own_chunked(*call, **options)
    close(o, right)
    close(after, last)


@check
def the_rule_of_drafted_tokens():
    home = "vllm.model_executor.layers.fla.ops.fused_recurrent"
    ours, theirs = pair(f"{home}.fused_recurrent_gated_delta_rule")
    pools = [Pools.make(range(8)).states for _ in range(2)]
    call = {
        "cu_seqlens": starts_of(3, 1), "use_qk_l2norm_in_kernel": True,
        "ssm_state_indices": torch.tensor([[3, 7, 5], [1, 2, 0]], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 3], dtype=torch.int32),
    }  # fmt: skip
    with Calls() as counted:
        o, state = ours(*heads(4), initial_state=pools[0], **call)
    assert counted.found == ["gated_delta_rule_update"] and state is pools[0]
    close(o, theirs(*heads(4), initial_state=pools[1], **call)[0])
    close(*pools)


@check
def vllms_own_kernel_has_values_first():
    """So npu-ops declines a call of vLLM that does not use vllm-ascend's kernel."""
    home = "vllm.model_executor.layers.fla.ops.fused_recurrent"
    ours = importlib.import_module("npu_ops_adapters.vllm.fused_recurrent_gated_delta_rule").ours
    with mock.patch(f"{home}.fused_recurrent_gated_delta_rule_fwd_kernel", pair):
        error = raised(ours, *heads(4))
    assert "not vllm-ascend's" in str(error), error


@check
def the_rule_of_a_decoding_step():
    ours, theirs = pair(f"{TRITON}.fla.sigmoid_gating.fused_sigmoid_gating_delta_rule_update")
    q, k, v, _, _ = heads(3)
    a, b, A_log, dt_bias = (*rows(2, 3, VALUE_HEADS), *rows(2, VALUE_HEADS, seed=7))
    slots = torch.tensor([3, 1, 6], dtype=torch.int32)
    pools = [Pools.make([3, 1, 6]).states for _ in range(2)]
    o, right = (
        function(
            A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, pool, slots,
            use_qk_l2norm_in_kernel=True, cu_seqlens=starts_of(1, 1, 1),
        )
        for function, pool in zip((ours, theirs), pools, strict=True)
    )  # fmt: skip
    close(o, right)
    close(*pools)


@check
def gates_and_norms():
    ours, theirs = pair(f"{TRITON}.fused_gdn_gating.fused_gdn_gating_patch")
    a, b, A_log, dt_bias = (*rows(2, 9, VALUE_HEADS), *rows(2, VALUE_HEADS, seed=7))
    for one, other in zip(*(f(A_log, a, b, dt_bias) for f in (ours, theirs)), strict=True):
        assert one.dtype == other.dtype
        close(one, other, 1e-3)
    for home in (f"{TRITON}.fla.l2norm", "vllm.model_executor.layers.fla.ops.l2norm"):
        x = rows(1, 9, HEADS, DIM)
        ours, _ = pair(f"{home}.l2norm_fwd")
        _, theirs = pair(f"{TRITON}.fla.l2norm.l2norm_fwd")
        close(ours(x), theirs(x), 1e-3)


def norm(**options):
    home = importlib.import_module("vllm_ascend.ops.layernorm")
    made = home.AscendRMSNormGated.__new__(home.AscendRMSNormGated)
    torch.nn.Module.__init__(made)
    weight = torch.nn.Parameter(rows(DIM, seed=5) + 1)
    settings = {"norm_before_gate": True, "group_size": None, "eps": 1e-6, "bias": None}
    vars(made).update(settings | options | {"weight": weight})
    return made


@check
def the_gated_norm():
    ours, theirs = pair("vllm_ascend.ops.layernorm.AscendRMSNormGated.forward_oot")
    x, z = rows(2, 9, DIM)
    for options in ({}, {"norm_before_gate": False}, {"group_size": None, "activation": "silu"}):
        made = norm(**options)
        with torch.no_grad(), Calls() as counted:
            y = ours(made, x, z)
        assert counted.found == ["rms_norm_gated"]
        close(y, theirs(made, x, z), 1e-3)


@check
def the_gated_norm_is_traced():
    """vLLM compiles models with Dynamo, which would raise on a graph break."""
    made = norm()
    x, z = rows(2, 9, DIM)
    with torch.no_grad():
        compiled = torch.compile(
            lambda x, z: made.forward_oot(x, z), fullgraph=True, backend="eager"
        )
        assert compiled(x, z).equal(made.forward_oot(x, z))


@check
def the_norm_of_a_weight_beside_1():
    """It equals transformers' norm, which does not round 1 + weight, and can be compiled."""
    home = importlib.import_module("vllm_ascend.ops.layernorm")
    made = home.AscendGemmaRMSNorm.__new__(home.AscendGemmaRMSNorm)
    torch.nn.Module.__init__(made)
    made.weight, made.variance_epsilon = torch.nn.Parameter(rows(DIM, seed=5) / 100), 1e-6
    truth = Qwen3NextRMSNorm(DIM)
    truth.weight = made.weight
    x, residual = rows(2, 9, DIM)
    chunk = mock.patch.object(torch.ops.vllm, "maybe_chunk_residual", lambda x, residual: residual)
    with torch.no_grad(), chunk:
        with Calls() as counted:
            y, (z, total) = made.forward_oot(x), made.forward_oot(x, residual)
        assert counted.found == ["rms_norm", "add_rms_norm"]
        close(total, x + residual, 0)
        close(y, truth(x), 0)
        close(z, truth(total), 0)
        rounded = made.weight.float() != (1 + made.weight).float() - 1
        assert rounded.any()
        compiled = torch.compile(made.forward_oot, fullgraph=True, backend="eager")
        assert all(map(torch.equal, compiled(x, residual), (z, total)))


# Calls that are left to vllm-ascend


# What vllm-ascend's method calls of ours in a decoding step. In 0.23.0 the others are native.
LEFT = [*["causal_conv1d_update", "gdn_gate"] * OLDER, "l2norm", "l2norm"]


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return error
    raise AssertionError("nothing was raised")


@check
def a_pool_that_is_not_ours_is_theirs():
    """npu-ops declines fp16 states. Functions that vllm-ascend's method calls may still be ours."""
    step = metadata([1, 1], [9, 70], [3, 7])
    for dotted, counted, (o, ours), (expected, theirs) in both([3, 7], step, torch.float16):
        wanted = LEFT if dotted == CORES[0] else LEFT[:1]
        assert counted == wanted, (dotted, counted)
        close(o, expected)
        close(ours.conv, theirs.conv, 0)
        close(ours.states, theirs.states)


@check
def ranks_that_share_a_prefill_are_theirs():
    group = types.SimpleNamespace(world_size=2)
    core = importlib.import_module("npu_ops_adapters.vllm.gated_delta_net")
    cls, step = pkgutil.resolve_name(CORES[0]), metadata([1], [9], [3])
    pools = Pools.make([3])
    before = pools.copy()
    with mock.patch("vllm.distributed.parallel_state._PCP", group):
        ours = functools.partial(core.forward_core, form=core.Form(True, False))
        error = raised(run, ours, cls, pools, step)
        assert "got 2 ranks, needs 1" in str(error)
        chunk = importlib.import_module("npu_ops_adapters.vllm.chunk_gated_delta_rule")
        assert "got 2 ranks" in str(raised(chunk.ours, *heads(3)))
    close(pools.conv, before.conv, 0)
    close(pools.states, before.states, 0)


@check
def a_method_of_another_source_is_refused_by_a_sentence():
    import npu_ops_adapters

    cls = pkgutil.resolve_name(CORES[0])
    npu_ops_adapters.revert()
    original = cls._forward_core

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        return original(self, mixed_qkv, b, a, core_attn_out)

    cls._forward_core = _forward_core
    try:
        found = states(npu_ops_adapters.apply())
        module, _, name = CORES[0].rpartition(".")
        said = found.pop((f"{module}:{name}._forward_core", "gated_delta_net"))
        assert "its source is none of those of vllm-ascend 0.18.0" in said, said
        assert cls._forward_core is _forward_core
        assert list(found.values()).count("applied") == 18, found
    finally:
        npu_ops_adapters.revert()
        cls._forward_core = original
        npu_ops_adapters.apply()


@check
def a_changed_signature_is_refused_by_a_sentence():
    import npu_ops_adapters

    home = importlib.import_module(f"{TRITON}.fused_gdn_gating")
    npu_ops_adapters.revert()
    with mock.patch.object(home, "fused_gdn_gating_patch", lambda A_log, a, b, more: None):
        said = states(npu_ops_adapters.apply())[
            f"{home.__name__}:fused_gdn_gating_patch", "gdn_gate"
        ]
        assert said.startswith("refused: expected (A_log, a, b, dt_bias, beta, threshold)"), said
        npu_ops_adapters.revert()
    npu_ops_adapters.apply()


@check
def disabled_it_is_theirs():
    import npu_ops_adapters

    cls, step = pkgutil.resolve_name(CORES[0]), metadata([1, 1], [9, 70], [3, 7])
    with as_it_was():
        with env.override(disable=frozenset({"gated_delta_net"})):
            npu_ops_adapters.apply()
            with Calls() as counted:
                run(cls._forward_core, cls, Pools.make([3, 7]), step)
            npu_ops_adapters.revert()
    # vllm-ascend's own method calls functions that we replaced.
    assert counted.found == LEFT, counted.found


@check
def a_rollout_that_must_be_consistent_says_why_it_is_not():
    cls, step = pkgutil.resolve_name(CORES[-1]), metadata([1], [9], [3])
    for mode, why in (("chunks", "unfinished chunks"), ("tokens", "got bfloat16, needs float32")):
        with env.override(consistent=mode):
            try:
                run(cls._forward_core, cls, Pools.make([3], torch.bfloat16), step)
            except RuntimeError as error:
                assert why in str(error), error
            else:
                raise AssertionError(mode)


@check
def consistent_tokens_have_the_same_bits_prompted_and_decoded():
    """32 value heads, because PyTorch's exp on CPUs rounds a remainder of elements differently."""
    for dotted in CORES:  # in this mode both have values first in their states
        same_bits(pkgutil.resolve_name(dotted))


def same_bits(cls):
    outs = []
    sizes = {"VALUE_HEADS": 32, "CHANNELS": (2 * HEADS + 32) * DIM}
    with env.override(consistent="tokens"), mock.patch.multiple("vllm_cpu.layers", **sizes):
        for cuts in ((70,), (40, 27, 1, 1, 1)):
            pools, seen, found = Pools.make([]), 0, []
            for length in cuts:
                step = metadata([length], [seen], [3])
                found.append(run(cls._forward_core, cls, pools, step, skip=seen))
                seen += length
            outs.append((torch.cat(found), pools.conv[3, : WIDTH - 1], pools.states[3]))
    for name, whole, cut in zip(("o", "conv", "states"), *outs, strict=True):
        different = [n for n, (x, y) in enumerate(zip(whole, cut, strict=True)) if not x.equal(y)]
        assert not different, (name, different)
