"""Test slime v0.2.2 with its NPU patches, and with npu-ops, against a reference on the CPU.

    python tests/trainers/fetch_slime.py slime Megatron-LM MindSpeed
    python -m pytest tests/trainers/upstream_slime.py

With npu-ops, slime's own train.py runs. Four GRPO steps in fp32, of which every second is
off-policy. Losses, gradient norms and log-probabilities agree up to rounding, and each rank counts
its operator calls.
"""

from __future__ import annotations

import pytest
import slime_runs as runs

# KL is a difference of log-probabilities of about 6, which fp32 resolves to 5e-7.
CLOSE = {"rel": 5e-5, "abs": 4e-6}
# Qwen3-Next's gradient norms are up to 30, and Adam amplifies rounding with each step: one norm had
# an error of 1.1e-4 after three updates.
CLOSE_AFTER_UPDATES = {"rel": 3e-4, "abs": 4e-6}
# SGLang's engine computes in fp16.
ENGINES_ROUNDING = 5e-3
METRICS = ("loss", "pg_loss", "entropy_loss", "ppo_kl", "kl_loss", "grad_norm")
# Functions of Megatron that both runs call. slime's patch removes `@jit_fuser` from them.
FUSED = ("calculate_logits_max", "calculate_cross_entropy_loss", "calculate_gradients")
OPERATORS = ("apply_rotary_pos_emb_freqs", "attention", "bias_dropout_add")
EXPERTS = ("npu_grouped_matmul",)
VISION = ("apply_rotary_pos_emb",)  # transformers' vision tower calls it
DELTA_NET = ("causal_conv1d", "chunk_gated_delta_rule", "rms_norm_gated")


def agree(found: runs.Run, truth: runs.Run, close: dict = CLOSE) -> None:
    assert len(truth.steps) == 4 and len(truth.rollouts) == 2
    assert truth.steps[1]["train/pg_loss"] != 0 and truth.steps[0]["train/grad_norm"] > 0.1
    for name in METRICS:
        got, expected = ([step[f"train/{name}"] for step in run.steps] for run in (found, truth))
        assert got == pytest.approx(expected, **close), name
    for name in ("log_probs", "ref_log_probs"):
        key = f"rollout/{name}"
        got, expected = ([rollout[key] for rollout in run.rollouts] for run in (found, truth))
        assert got == pytest.approx(expected, **CLOSE), name


def called(found: runs.Run, names: tuple[str, ...]) -> None:
    for calls in found.calls:
        missing = [name for name in names if not calls.get(name)]
        assert not missing, calls


def is_by_npu_ops(found: runs.Run, truth: runs.Run, devices: int) -> None:
    agree(found, truth)
    assert len(found.calls) == devices
    called(found, OPERATORS + FUSED)


def is_by_torch_npu(found: runs.Run, truth: runs.Run, close: dict = CLOSE) -> None:
    agree(found, truth, close)
    called(found, ("npu_fusion_attention", "npu_rms_norm", *FUSED))
    ours = OPERATORS + DELTA_NET + VISION
    assert not any(name in calls for calls in found.calls for name in ours), found.calls


@pytest.mark.parametrize("devices", [1, 2])
def test_with_npu_ops(devices, folder, truth):
    found = runs.run(folder, "npu_ops", "qwen3", devices)
    is_by_npu_ops(found, truth("qwen3"), devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_with_slimes_patches(devices, folder, truth):
    is_by_torch_npu(runs.run(folder, "shipped", "qwen3", devices), truth("qwen3"))


@pytest.mark.parametrize("devices", [1, 2])
def test_gated_delta_net_with_npu_ops(devices, folder, truth):
    """slime's own Qwen3-Next layers with npu-ops in place of fla; each rank computes them whole.

    npu-ops fixes two bugs of these layers. The reference has one of them fixed, too. The other one
    occurs only on two ranks.
    """
    found = runs.run(folder, "npu_ops", "qwen3_next", devices)
    agree(found, truth("qwen3_next"), CLOSE_AFTER_UPDATES)
    assert len(found.calls) == devices
    called(found, OPERATORS + FUSED + DELTA_NET)


@pytest.mark.parametrize("devices", [1, 2])
def test_gated_delta_net_with_slimes_patches(devices, folder, truth):
    """Train Qwen3-Next with fla's own kernels, and with MindSpeed imported before mbridge."""
    found = runs.run(folder, "shipped", "qwen3_next", devices)
    is_by_torch_npu(found, truth("qwen3_next"), CLOSE_AFTER_UPDATES)


@pytest.mark.parametrize("devices", [1, 2])
def test_experts_with_npu_ops(devices, folder, truth):
    """Train Qwen3-MoE; on two ranks, each rank has half of the experts."""
    found = runs.run(folder, "npu_ops", "qwen3_moe", devices)
    is_by_npu_ops(found, truth("qwen3_moe"), devices)
    called(found, EXPERTS)


@pytest.mark.parametrize("devices", [1, 2])
def test_experts_with_slimes_patches(devices, folder, truth):
    found = runs.run(folder, "shipped", "qwen3_moe", devices)
    is_by_torch_npu(found, truth("qwen3_moe"))
    called(found, EXPERTS)


def test_pictures_with_npu_ops(folder, truth):
    """Megatron-Bridge's Qwen3-VL with a picture in each answer; its layers are recomputed."""
    found = runs.run(folder, "npu_ops", "qwen3_vl")
    is_by_npu_ops(found, truth("qwen3_vl"), 1)
    called(found, VISION)


def test_pictures_with_slimes_patches(folder, truth):
    is_by_torch_npu(runs.run(folder, "shipped", "qwen3_vl"), truth("qwen3_vl"))


def test_pictures_on_two_ranks_with_npu_ops(folder, truth):
    """Train Qwen3-VL with sequence parallelism, as slime's script for it does."""
    found = runs.run(folder, "npu_ops", "qwen3_vl", 2, runs.EVEN)
    is_by_npu_ops(found, truth("qwen3_vl", rollouts=runs.EVEN), 2)
    called(found, VISION)


def test_pictures_on_two_ranks_with_slimes_patches(folder, truth):
    found = runs.run(folder, "shipped", "qwen3_vl", 2, runs.EVEN)
    is_by_torch_npu(found, truth("qwen3_vl", rollouts=runs.EVEN))


def test_sglang_as_rollout(folder):
    """SGLang answers on another emulated NPU; slime sends it weights by HCCL before each rollout.

    Training on these answers gives the same results on the CPU.
    """
    found = runs.run(folder, "engine", samples="sampled")
    is_by_npu_ops(found, runs.run(folder, "truth", rollouts="sampled"), 1)
    off = [step["train/train_rollout_logprob_abs_diff"] for step in found.steps]
    assert max(off) < ENGINES_ROUNDING, off
