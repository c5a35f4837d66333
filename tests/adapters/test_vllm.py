"""npu-ops in vLLM on NPUs: vllm-ascend's own source with ours, in another process;
see vllm_cpu/."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import types

import fetch_vllm
import pytest
import torch
from npu_ops_adapters import vllm
from npu_ops_adapters.vllm import attention, gated_delta_net, qk_norm_rope
from processes import environment
from vllm_cpu import checks, functions, rotary, versions

import npu_ops
from npu_ops.core import env

pytestmark = pytest.mark.xdist_group("vllm")
HERE = pathlib.Path(__file__).parent
SETTINGS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # only vLLM's entry point may load the adapters
    "CUDA_VISIBLE_DEVICES": "",  # with it vLLM keeps a Triton that has no device yet
    "TRITON_INTERPRET": "1",
    "VLLM_PLUGINS": "npu_ops",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
CHECKS = (*checks.CHECKS, *functions.CHECKS, *rotary.CHECKS)


@functools.cache
def ran(version):
    """Run the checks of a version, also if they fail, once."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_cpu.checks"],
        env=environment(*fetch_vllm.modules(version), HERE, HERE.parent, **SETTINGS),
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "version, name",
    [
        pytest.param(version, check.__name__, marks=pytest.mark.slow if later else ())
        for later, version in enumerate(fetch_vllm.VERSIONS)
        for check in CHECKS
        if versions.has(check, version)
    ],
)
def test_ours_beside_vllm_ascend_s(version, name):
    done = ran(version)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    errors = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert errors[name] is None, f"{name}:\n{errors[name]}"


@pytest.mark.slow
@pytest.mark.parametrize("version", fetch_vllm.VERSIONS)
def test_the_core_of_a_layer_on_the_emulated_npu(version):
    """Uses vLLM's metadata, the real torch_npu, and kernels that the vendor compiled."""
    path = environment(*fetch_vllm.modules(version), HERE, HERE.parent, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python", "-m", "vllm_cpu.on_npu"],
        env=path | {"VLLM_PLUGINS": "none"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(rows) == 10
    step = ["causal_conv1d_update", "gated_delta_rule_update"]
    prefill = ["causal_conv1d", "gdn_gate", "chunk_gated_delta_rule"]
    for name, called, (out, conv, states) in rows:
        assert called == step * (name != "prefill") + prefill * (
            "pref" in name or name == "mixture"
        )
        assert conv == 0 and out < 1e-4 and states < 1e-5, (name, out, conv, states)


# Modules where a later vllm-ascend defines the methods that it puts into vLLM's classes.
DEFINED = {
    "patch_qwen3_5:Qwen3NextAttention.forward": "patch_qwen3_5:AscendQwen3NextAttention.forward",
    "patch_qwen3_5:Qwen3_5GatedDeltaNet._forward_core": (
        "vllm_ascend.ops.gdn:AscendGatedDeltaNetAttention._forward_core"
    ),
    "patch_qwen3vl:Qwen3Attention.forward": "patch_qwen3vl:forward_with_split_qkv_rmsnorm_mrope",
    "patch_qwen3vl:Qwen3MoeAttention.forward": "patch_qwen3vl:forward_with_split_qkv_rmsnorm_mrope",
    "patch_qwen3vl:Qwen3_VisionTransformer.fast_pos_embed_interpolate": (
        "patch_qwen3vl:_fast_pos_embed_interpolate"
    ),
}


def definition(folder: pathlib.Path, target: str) -> tuple[ast.FunctionDef, str] | None:
    """Return the function that a patch replaces, and its source; None if this version lacks it."""
    target = DEFINED.get(target.removeprefix(f"{qk_norm_rope.WORKER}."), target)
    if target.startswith("patch_"):
        target = f"{qk_norm_rope.WORKER}.{target}"
    module, _, attribute = target.partition(":")
    path = folder / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return None
    source = path.read_text()
    found = ast.parse(source)
    for name in attribute.split("."):
        named = [node for node in found.body if getattr(node, "name", None) == name]
        if not named:
            return None
        (found,) = named
    return found, ast.get_source_segment(source, found)


def test_the_patches_know_the_source_of_0_23_0(monkeypatch):
    """Only the source is read, in a moment; slow tests run it."""
    known = set()
    worker = types.ModuleType(f"{qk_norm_rope.WORKER}.patch_qwen3vl")
    worker.Qwen3_VisionTransformer = object  # in 0.18.0 the tower is vLLM's
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    with env.override(consistent="tokens"):
        patches = list(vllm.patches())
    for patch in patches:
        found = definition(fetch_vllm.ascend(), patch.target)
        if found is None:
            continue
        function, source = found
        parameters = tuple(arg.arg for arg in function.args.args)
        assert parameters in patch.signatures, (patch.target, parameters)
        known.add(patch.op)
        digest = hashlib.sha256("".join(source.split()).encode()).hexdigest()[:12]
        if patch.op == "gated_delta_net":
            assert gated_delta_net.FORMS[digest] == gated_delta_net.Form(v_first=True, sends=False)
        if patch.op == "qk_norm_rope" and patch.target.endswith(".forward"):
            gated = patch.target.endswith(":Qwen3NextAttention.forward")
            form = qk_norm_rope.ours_into if gated else qk_norm_rope.ours
            assert qk_norm_rope.FORMS[digest] is form
    assert known == {
        *("causal_conv1d_update", "chunk_gated_delta_rule", "gated_delta_net", "qk_norm_rope"),
        *("gated_delta_rule_update", "gdn_gate", "l2norm", "mrope", "rms_norm", "rms_norm_gated"),
        *("rope", "grouped_linear", "attention", "vision_position"),
    }


def test_a_later_vllm_ascend_gives_its_method_to_two_classes(monkeypatch):
    module = types.ModuleType(f"{gated_delta_net.WORKER}.patch_qwen3_5")
    module._GDN_PATCH_TARGET = module.AscendGatedDeltaNetAttention = object
    monkeypatch.setitem(sys.modules, module.__name__, module)
    targets = [patch.target for patch in vllm.patches() if patch.op == "gated_delta_net"]
    assert [target.partition(":")[2] for target in targets] == [
        "Qwen3NextGatedDeltaNet._forward_core",
        "_GDN_PATCH_TARGET._forward_core",
        "AscendGatedDeltaNetAttention._forward_core",
    ]
    patch_module = (fetch_vllm.ascend() / f"{module.__name__.replace('.', '/')}.py").read_text()
    for name in ("_GDN_PATCH_TARGET", "AscendGatedDeltaNetAttention"):
        assert name in patch_module


def test_consistent_models_are_not_taken_from_vllms_cache(monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    monkeypatch.setattr("npu_ops_adapters.apply", lambda: None)
    with env.override(consistent="tokens"):
        vllm.register()
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "1"


HEADS, KV_HEADS, WIDE, BLOCK = 4, 2, 64, 128


def attention_layer(**changes):
    """Return what the method reads of vllm-ascend's layer, with a cache of four blocks."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, BLOCK, KV_HEADS, WIDE).bfloat16()
    given = {"key_cache": keys, "value_cache": values, "scale": WIDE**-0.5, "attn_type": "decoder"}
    given |= {"alibi_slopes": None, "sliding_window": None, "sinks": None}
    return types.SimpleNamespace(**given | changes)


def attention_step():
    """Return a step: the last 60 of 200 tokens, one token of a sequence with 9, and padding.

    In 0.23.0 the three padding tokens form a sequence.
    """
    return types.SimpleNamespace(
        query_start_loc=torch.tensor([0, 60, 61], dtype=torch.int32), causal=True,
        seq_lens=torch.tensor([200, 9, 1], dtype=torch.int32), seq_lens_list=[200, 9, 1],
        actual_seq_lengths_q=[60, 61, 64], max_query_len=60,
        block_tables=torch.tensor([[2, 0], [3, 3], [0, 0]], dtype=torch.int32),
    )  # fmt: skip


def test_consistent_attention_over_the_cache_is_that_of_whole_sequences():
    layer, q = attention_layer(), torch.randn(64, HEADS, WIDE).bfloat16()
    out = torch.full_like(q, torch.nan)
    with env.override(consistent="tokens"):
        attention.ours(layer, q, None, None, None, attention_step(), out)
        for rows, blocks, length in ((slice(0, 60), [2, 0], 200), (slice(60, 61), [3], 9)):
            k, v = (x[blocks].flatten(0, 1)[:length] for x in (layer.key_cache, layer.value_cache))
            whole = npu_ops.attention(q[None, rows], k[None], v[None], is_causal=True)
            assert out[rows].equal(whole[0])
    assert out[61:].isnan().all()


def graph_mode(separate: bool):
    """Return a stand-in for vLLM's configuration. separate: decoding steps have their own graph."""
    mode = types.SimpleNamespace(name="FULL", separate_routine=lambda: separate)
    return types.SimpleNamespace(compilation_config=types.SimpleNamespace(cudagraph_mode=mode))


def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
    """Return what a graph needs of vllm-ascend's metadata; its lists are from the capture."""
    return types.SimpleNamespace(causal=True, max_query_len=1)


def decoding(starts, lengths, table):
    """Return vllm-ascend's buffers of three sequences, of which the last is a graph's padding."""
    return types.SimpleNamespace(
        query_start_loc=starts, seq_lens=lengths, block_table_tensor=table, num_reqs=3
    )


def test_consistent_attention_in_a_graph_reads_the_buffers_of_each_step(monkeypatch):
    monkeypatch.setattr(attention, "is_captured", lambda device: True)
    layer, q = attention_layer(vllm_config=graph_mode(True)), torch.randn(3, HEADS, WIDE).bfloat16()
    common = decoding(
        torch.tensor([0, 1, 2, 3], dtype=torch.int32), torch.tensor([130, 9, 0], dtype=torch.int32),
        torch.tensor([[2, 0], [3, 3], [0, 0]], dtype=torch.int32),
    )  # fmt: skip
    builder, out = types.SimpleNamespace(), torch.full_like(q, torch.nan)
    made = attention._with_buffers(build)
    with env.override(consistent="tokens"):
        attention.ours(layer, q, None, None, None, made(builder, 0, common), out)
        for row, blocks, length in ((0, [2, 0], 130), (1, [3], 9)):
            k, v = (x[blocks].flatten(0, 1)[:length] for x in (layer.key_cache, layer.value_cache))
            alone = npu_ops.attention(q[None, row, None], k[None], v[None], is_causal=True)
            assert out[row].equal(alone[0, 0])
    assert not out[2].any()
    common.seq_lens = common.seq_lens.clone()
    with pytest.raises(RuntimeError, match="got lengths in other memory than graphs read"):
        made(builder, 0, common)


def test_consistent_attention_in_a_graph_of_prompts_is_an_error(monkeypatch):
    monkeypatch.setattr(attention, "is_captured", lambda device: True)
    q = torch.randn(3, HEADS, WIDE).bfloat16()
    layer = attention_layer(vllm_config=graph_mode(False))
    with env.override(consistent="tokens"), pytest.raises(ValueError, match="got FULL, needs NONE"):
        attention.ours(layer, q, None, None, None, build(None, 0, None), q.clone())


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64},
        {"sinks": torch.zeros(HEADS)},
        {"alibi_slopes": torch.zeros(HEADS)},
        {"attn_type": "encoder"},
        {"key_cache": None},
        {"dcp_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_attention_that_cannot_be_consistent_is_an_error(changes):
    target = f"vllm_ascend.attention.{attention._IMPLEMENTATIONS[0]}.forward_impl"
    made = vllm.functions.made(attention.ours, target, lambda *call: pytest.fail("it ran"))
    q = torch.randn(64, HEADS, WIDE).bfloat16()
    with env.override(consistent="tokens"), pytest.raises(RuntimeError, match="got"):
        made(attention_layer(**changes), q, None, None, None, attention_step(), q.clone())
