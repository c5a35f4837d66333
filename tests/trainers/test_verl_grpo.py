"""Test verl's GRPO trainer on Ray, with its NPU patches and with npu-ops, against the CPU.

Three steps in fp32 on the same answers. Losses, gradient norms, rewards and each sequence's
log-probabilities, of actor and reference, agree up to rounding. Run by `make test-trainers`;
a run takes minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import fetch_sglang
import pytest
import sglang_process
import verl_grpo_runs
import verl_runs

pytestmark = [pytest.mark.xdist_group("verl"), pytest.mark.slow]

ATTENTION = ("apply_rotary_pos_emb", "attention")
RULE = (*ATTENTION, "chunk_gated_delta_rule", "rms_norm_gated")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: model, text or pictures, number of workers, npu-ops operators that it must call.

    packs: whether verl may pack sequences without npu-ops. It must not if a sequence's state would
    pass into the next.
    """

    model: str
    workers: int = 1
    data: str = "text"
    operators: tuple[str, ...] = ATTENTION
    more: tuple[str, ...] = ()
    packs: bool = True

    def lines(self, folder, who: str) -> list[str]:
        packs = self.packs or who == "npu_ops"
        packing = f"actor_rollout_ref.model.use_remove_padding={packs}"
        more = () if who == "truth" else self.more
        attention = {"truth": "eager", "shipped": "flash_attention_2", "npu_ops": "npu_ops"}[who]
        return verl_grpo_runs.overrides(
            folder, self.model, attention, packing, *more, data=self.data
        )


RUNS = {
    "qwen3": Run("qwen3"),
    "qwen3_2": Run("qwen3", workers=2),
    "qwen3_5": Run("qwen3_5", operators=RULE, packs=False),
    "qwen3_vl": Run("qwen3_vl", data="pictures"),
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return a function from (who, name) to a run's results; each runs once.

    All runs of a model share one reference, "truth", with one worker.
    """
    folder = tmp_path_factory.mktemp("grpo")
    verl_runs.write_models(folder, tuple({run.model for run in RUNS.values()}))

    @functools.cache
    def of(who: str, name: str) -> verl_grpo_runs.Steps:
        run = RUNS[name]
        workers = 1 if who == "truth" else run.workers
        return verl_grpo_runs.run(
            folder, who, name, run.lines(folder, who), f"{run.model}.json", workers
        )

    return of


def agree(found: verl_grpo_runs.Steps, truth: verl_grpo_runs.Steps) -> None:
    assert min(truth.metrics["actor/grad_norm"]) > 0.1 and truth.metrics["actor/kl_loss"][0] > 0
    for name, steps in truth.metrics.items():
        assert len(steps) == 3
        assert found.metrics[name] == pytest.approx(steps, rel=1e-4, abs=2e-6), name
    # one pass of the actor, one of the reference
    assert len(truth.passes) == len(found.passes) == 2 * 3
    for mine, right in zip(found.passes, truth.passes, strict=True):
        assert len(right) == 4 * verl_grpo_runs.ANSWERS and mine.keys() == right.keys()
        for tokens, row in right.items():
            assert mine[tokens] == pytest.approx(row, abs=2e-5)
    assert max(found.sampled) < 1e-6  # the rollout server has the actor's weights


@pytest.mark.parametrize("name", RUNS)
def test_with_npu_ops(name, steps):
    run = RUNS[name]
    truth = steps("truth", run.model)
    found = steps("npu_ops", name)
    agree(found, truth)
    assert len(found.calls) == run.workers
    for calls in found.calls:
        missing = [operator for operator in run.operators if not calls.get(operator)]
        assert not missing, calls


@pytest.mark.parametrize("name", RUNS)
def test_with_verls_patches(name, steps):
    truth = steps("truth", RUNS[name].model)
    found = steps("shipped", name)
    agree(found, truth)
    assert len(found.calls) == RUNS[name].workers
    for calls in found.calls:
        assert calls["npu_rms_norm"] and calls["npu_cross_entropy_loss"], calls
        assert not any(operator in calls for operator in RULE)


def test_sglang_as_rollout(tmp_path):
    """SGLang's engine on the CPU samples with the weights that the actor sends.

    At each step its probabilities are those that npu-ops computes in the actor.
    """
    verl_runs.write_models(tmp_path, ("qwen3",))
    lines = RUNS["qwen3"].lines(tmp_path, "npu_ops") + verl_grpo_runs.with_sglang()
    path = verl_runs.variables()["PYTHONPATH"]
    changes = verl_grpo_runs.beside_sglang(tmp_path / "triton", path)
    found = verl_grpo_runs.run(tmp_path, "npu_ops", "sglang", lines, "none", 1, **changes)
    assert len(found.sampled) == 3 and max(found.sampled) < 1e-7
    assert min(found.metrics["actor/grad_norm"]) > 0.1
    (calls,) = found.calls
    assert calls["attention"] == calls["apply_rotary_pos_emb"] == 96


def sampled_in_bf16(folder, **changes) -> tuple[float, ...]:
    """Return, per step, the largest difference of a token's probability between actor and engine.

    verl's actor is unchanged; both run on the CPU in bf16.
    """
    verl_runs.write_models(folder, ("qwen3",))
    lines = RUNS["qwen3"].lines(folder, "npu_ops") + verl_grpo_runs.with_sglang()
    lines = [line.replace("param_dtype:fp32", "param_dtype:bf16") for line in lines]
    lines = [line.replace("dtype=float32", "dtype=bfloat16") for line in lines]
    path = os.pathsep.join([verl_runs.variables()["PYTHONPATH"], str(fetch_sglang.tree())])
    changes |= {"PYTHONPATH": path, "SGLANG_PLATFORM": "sglang_cpu", "NPU_OPS_DISABLE": "",
                "CPU_VISIBLE_DEVICES": "0"}  # fmt: skip
    found = verl_grpo_runs.run(folder, "truth", "sglang", lines, "none", 1, **changes)
    assert len(found.sampled) == 3 and min(found.metrics["actor/grad_norm"]) > 0.1
    return found.sampled


def test_with_the_setting_the_actor_has_sglangs_probabilities(tmp_path):
    """SGLang on CPUs computes log(softmax), so the last bit of fp32 may differ."""
    assert max(sampled_in_bf16(tmp_path, NPU_OPS_CONSISTENT="1")) < 2e-7


def test_without_the_setting_it_does_not(tmp_path):
    assert max(sampled_in_bf16(tmp_path)) > 1e-5


def with_vllm(folder, model: str, dtype: str, eager: bool, **changes) -> verl_grpo_runs.Steps:
    """Run verl's trainer and the vLLM that it starts, both on one emulated NPU."""
    changes |= verl_grpo_runs.beside_vllm()
    path = changes["PYTHONPATH"]
    verl_runs.write_models(folder, (model,), PYTHONPATH=path)  # by vLLM's transformers
    lines = Run(model).lines(folder, "npu_ops") + verl_grpo_runs.with_vllm(dtype, eager)
    if model == "qwen3_next_served":
        lines += verl_grpo_runs.FOR_DELTA_NET
    if dtype == "bfloat16":
        lines = [line.replace("param_dtype:fp32", "param_dtype:bf16") for line in lines]
    found = verl_grpo_runs.run(folder, "npu_ops", "vllm", lines, "none", 1, **changes)
    assert len(found.sampled) == 3 and min(found.metrics["actor/grad_norm"]) > 0.1
    (calls,) = found.calls
    assert calls["attention"] == calls["apply_rotary_pos_emb"] >= 48
    return found


SERVING = {"rms_norm", "add_rms_norm", "rope", "attention", "linear"}
SERVING_NEXT = SERVING | {
    *("causal_conv1d", "causal_conv1d_update", "l2norm", "rms_norm_gated"),
    *("chunk_gated_delta_rule", "gated_delta_rule_update", "grouped_linear"),
}


# vllm-ascend's own attention takes no fp32. Graphs are verl's default.
@pytest.mark.parametrize(
    "model, dtype, eager, operators",
    [
        ("qwen3_served", "float32", True, SERVING),
        ("qwen3_served", "bfloat16", False, SERVING),
        ("qwen3_next_served", "bfloat16", True, SERVING_NEXT),
    ],
)
def test_vllm_as_rollout(tmp_path, model, dtype, eager, operators):
    """With NPU_OPS_CONSISTENT, vLLM's probabilities are the actor's, bit for bit.

    This also holds after weight updates.
    """
    found = with_vllm(tmp_path, model, dtype, eager, NPU_OPS_CONSISTENT="1")
    assert found.sampled == (0, 0, 0)
    served = sglang_process.calls(found.said)
    assert {op for op, _ in served} == operators, served
    assert {implementation for _, implementation in served} == {"triton_ascend"}, served
    assert eager or "Capturing CUDA graphs" in found.said


def test_without_the_setting_vllm_has_other_probabilities(tmp_path):
    found = with_vllm(tmp_path, "qwen3_served", "bfloat16", True)
    assert max(found.sampled) > 1e-5
    assert set(sglang_process.calls(found.said)) == {("rope", "triton_ascend")}
