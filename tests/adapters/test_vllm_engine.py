"""vLLM's engine with vllm-ascend on the emulated NPU, in other processes; see vllm_npu/."""

from __future__ import annotations

import json
import re

import fetch_vllm
import pytest
import vllm_process
from checkpoints import in_dtype
from sglang_cpu.tiny import HYBRID, PICTURE, PICTURED
from sglang_process import calls
from vllm_npu.rollout import MORE

pytestmark = pytest.mark.slow
GEMMA_NORMS = {"rms_norm", "add_rms_norm"}
GATED_DELTA_NET = {
    *("causal_conv1d", "causal_conv1d_update", "gdn_gate", "rms_norm_gated"),
    *("chunk_gated_delta_rule", "gated_delta_rule_update"),
}
DECODING = {"causal_conv1d_update", "gated_delta_rule_update", "rms_norm_gated"}
OPS = {
    "qwen3": {"rope"},
    "qwen3next": {"qk_norm_rope"} | GEMMA_NORMS | GATED_DELTA_NET,
    "qwen3vl": {"qk_norm_rope", "rope"},
    "qwen3_5": {"qk_norm_rope", "rope"} | GEMMA_NORMS | GATED_DELTA_NET,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(version, marks=pytest.mark.xdist_group(f"vllm {version}"))
        for version in fetch_vllm.VERSIONS
    ],
)
def version(request):
    """The version of vLLM and of vllm-ascend."""
    return request.param


@pytest.fixture(scope="module")
def tiny(version, tmp_path_factory):
    """A folder of models, made with transformers unpatched."""
    folder = tmp_path_factory.mktemp("tiny")
    vllm_process.run("pictures", folder, version=version, NPU_OPS_DISABLE="all")
    vllm_process.run("tiny", folder, *OPS, version=None, NPU_OPS_DISABLE="all")
    return folder


def served(version, folder, *settings, **variables):
    """Check that the engine's tokens are transformers'; return its other rows, and
    all its output."""
    told = {"version": version, "command": vllm_process.EMULATED, "NPU_OPS_LOG": "calls"}
    rows, said = vllm_process.run("engine", folder, *settings, **told, **variables)
    expected = json.loads((folder / "expected.json").read_text())
    right = [[prompt, following] for prompt, (_, following) in expected.items()]
    for how in ("alone", "together"):
        assert [row for served_how, *row in rows if served_how == how] == right, how
    assert "vllm-ascend's own" not in said  # no fallback
    assert ": refused: " not in said  # every patch knows this version
    return rows[len(right) * 2 :], said


@pytest.mark.parametrize("model", OPS)
def test_the_engine_generates_what_transformers_does_by_our_operators(version, tiny, model):
    """Chunked prefill, decoding, and both in one step, by vllm-ascend's worker and model runner."""
    _, said = served(version, tiny / model)
    found = calls(said)
    assert {op for op, _ in found} == OPS[model], found
    assert {implementation for _, implementation in found} <= {"triton_ascend", "aclnn"}, found


# vllm-ascend's fusions register with the vendor's compiler, which needs CANN's graph engine.
NOT_FUSED = dict.fromkeys(
    ("enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add"), False
)
OF_A_STEP = {  # in the graph of a decoding step
    "qwen3": {"rope"},
    "qwen3next": {"qk_norm_rope"} | GEMMA_NORMS | DECODING,
    "qwen3vl": {"qk_norm_rope"},
    "qwen3_5": {"qk_norm_rope"} | GEMMA_NORMS | DECODING,
}


def in_graphs(mode: str, *sizes: int) -> tuple[str, ...]:
    """Return settings of an engine that compiles, and captures steps of `sizes` tokens."""
    compiled = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    fused = {"ascend_compilation_config": NOT_FUSED}
    return (
        "enforce_eager=false",
        f"compilation_config={json.dumps(compiled)}",
        f"additional_config={json.dumps(fused)}",
    )


def replayed(rows) -> dict:
    """Return how often graphs were replayed, by (rows of the graph, tokens of the step)."""
    found = (row for what, *row in rows if what == "replayed")
    return {(size, tokens): often for size, tokens, often in found}


def captured(said: str) -> str:
    """Return the output during captures."""
    return "".join(part.partition("capture ends")[0] for part in said.split("capture begins")[1:])


@pytest.mark.parametrize("model", OPS)
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_graphs_generate_the_same(version, tiny, model, mode):
    """Compiled models, with padding: one token in a graph of two rows, three in one of four.

    For a graph of a whole step vllm-ascend passes attention its lengths while the graph runs. With
    piecewise graphs attention and the core of Gated Delta Net stay outside.
    """
    rows, said = served(version, tiny / model, *in_graphs(mode, 2, 4))
    outside = DECODING - {"rms_norm_gated"} if mode == "PIECEWISE" else set()
    found = calls(captured(said))
    assert {op for op, _ in found} == OF_A_STEP[model] - outside, found
    graphs = replayed(rows)
    assert graphs[2, 1] >= 10 and graphs[4, 4 if model == "qwen3vl" else 3] >= 1, graphs


DRAFTS = {"num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WITH_DRAFTS = f"speculative_config={json.dumps({'method': 'ngram'} | DRAFTS)}"
VERIFIED = re.compile(r"gated_delta_rule_update\(.*int32\[\d+, 3\]@npu")  # slots for two drafts


def test_drafts_are_verified(version, tiny):
    """vLLM drafts tokens that it finds in the prompt; states of rejected ones are discarded."""
    _, said = served(version, tiny / "qwen3next", WITH_DRAFTS)
    assert VERIFIED.search(said)


def test_drafts_are_verified_in_graphs(version, tiny):
    """Graphs run steps in which each sequence has two drafts; other steps run without."""
    settings = (WITH_DRAFTS, *in_graphs("FULL_DECODE_ONLY", 3, 12))
    rows, said = served(version, tiny / "qwen3next", *settings)
    assert VERIFIED.search(captured(said))
    assert replayed(rows)[3, 3] > 0


# Graphs without additional_config: npu-ops turns vllm-ascend's fusions off.
WAYS = {
    "eager": (),
    "drafts": (WITH_DRAFTS,),
    "FULL_DECODE_ONLY": in_graphs("FULL_DECODE_ONLY", 2, 4)[:2],
    "PIECEWISE": in_graphs("PIECEWISE", 2, 4)[:2],
}


@pytest.mark.parametrize(
    "model, way",
    [
        *((model, way) for model in OPS for way in ("eager", "FULL_DECODE_ONLY", "PIECEWISE")),
        ("qwen3next", "drafts"),
    ],
)
def test_consistent_log_probabilities_are_a_trainers_bit_for_bit(
    version, tiny, tmp_path, model, way
):
    """Covers sampled tokens, chunked and batched prompts, cached prefixes, and drafts."""
    folder, mode = in_dtype(tiny / model, "bfloat16", tmp_path), {"NPU_OPS_CONSISTENT": "1"}
    told = {"command": vllm_process.EMULATED} | mode | {"VLLM_ASCEND_ENABLE_NZ": "0"}
    asked = (folder, 'dtype="bfloat16"', *WAYS[way])
    rows, said = vllm_process.run("rollout", *asked, version=version, NPU_OPS_LOG="calls", **told)
    assert ": refused: " not in said
    served = [row for what, *row in rows if what == "served"]
    (tmp_path / "served.json").write_text(json.dumps(served))
    if way in ("FULL_DECODE_ONLY", "PIECEWISE"):
        found = {op for op, _ in calls(captured(said))}
        assert "linear" in found and ("attention" in found) == (way == "FULL_DECODE_ONLY"), found
        assert any(size > tokens for size, tokens in replayed(rows))  # some with padding
    compared, _ = vllm_process.run(
        "rollout", folder, "bfloat16", tmp_path / "served.json", version=None, **told
    )
    pictures = [row for row in compared if row[1] in (len(PICTURE), len(PICTURE + MORE))]
    text = [row for row in compared if row not in pictures]
    caches = [0] * 8 if model in HYBRID else [0] * 6 + [128, 256]  # whole blocks of 128 tokens
    assert [cached for _, _, cached, *_ in text] == caches
    assert all(sampled == equal == 5 and most == 0 for *_, sampled, most, equal in text)
    assert len(pictures) == 2 * (model in PICTURED)
    assert all(sampled == equal == 5 and most == 0 for *_, sampled, most, equal in pictures)
