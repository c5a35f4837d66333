"""Test verl's SFT trainer with its NPU patches, and with npu-ops, against a reference on the CPU.

Two ranks, three steps in fp32: losses and gradient norms agree up to rounding, and each rank counts
its operator calls. Run by `make test-trainers`; `make test` has one run of each kind.
"""

from __future__ import annotations

import dataclasses

import pytest
import verl_data
import verl_runs

pytestmark = pytest.mark.xdist_group("verl")

PACKED, PADDED = (f"model.use_remove_padding={value}" for value in (True, False))
FSDP2 = "engine.strategy=fsdp2"
ULYSSES = "engine.ulysses_sequence_parallel_size=2"
DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
FLASH, OURS, EAGER = "flash_attention_2", "npu_ops", "eager"
LORA = ("model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear")
USERS = ("model.enable_gradient_checkpointing=True", "data.use_dynamic_bsz=True")  # verl's defaults
CLOSE = {"rel": 2e-5}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: model, text or pictures, settings with npu-ops, npu-ops operators that it must call.

    task: settings of the training itself, also for verl alone and for the reference.
    """

    model: str
    data: str = "text"
    more: tuple[str, ...] = (PACKED,)
    operators: tuple[str, ...] = ("apply_rotary_pos_emb", "attention")
    task: tuple[str, ...] = ()

    @property
    def truth(self) -> str:
        return "_".join((self.model, self.data, *(["lora"] if self.task else [])))

    def overrides(self, folder, attention: str, *more: str) -> list[str]:
        return verl_runs.overrides(folder, self.model, attention, *more, *self.task, data=self.data)

    def without_packing(self, folder, attention: str) -> list[str]:
        """Return settings that do not pack sequences of models with Gated Delta Net.

        Without npu-ops and fla, verl and transformers carry a packed sequence's state into the
        next, so results would be wrong.
        """
        return self.overrides(folder, attention, PADDED if self.model in DELTA_NET else PACKED)


RULE = ("apply_rotary_pos_emb", "attention", "chunk_gated_delta_rule", "rms_norm_gated")
RUNS = {
    "qwen3": Run("qwen3"),
    "qwen3, FSDP2": Run("qwen3", more=(PACKED, FSDP2)),
    "qwen3, padded": Run("qwen3", more=(PADDED,)),
    "qwen3, padded, FSDP2": Run("qwen3", more=(PADDED, FSDP2)),
    "qwen3, checkpointing and dynamic batches": Run("qwen3", more=(PACKED, *USERS)),
    "qwen3, LoRA": Run("qwen3", task=LORA),
    "qwen3_moe": Run("qwen3_moe", more=(PACKED, FSDP2)),
    "qwen3_vl": Run("qwen3_vl", "pictures"),
    "qwen3_vl, FSDP2": Run("qwen3_vl", "pictures", (PACKED, FSDP2)),
    "qwen3_vl, padded": Run("qwen3_vl", "pictures", (PADDED,)),
    "qwen3_vl, padded, FSDP2": Run("qwen3_vl", "pictures", (PADDED, FSDP2)),
    "qwen3_vl, Ulysses": Run("qwen3_vl", "pictures", (PACKED, ULYSSES)),
    "qwen3_vl_moe": Run("qwen3_vl_moe", "pictures"),
    "qwen3_next": Run("qwen3_next", more=(PADDED,), operators=RULE),
    "qwen3_5": Run("qwen3_5", more=(PACKED, FSDP2), operators=(*RULE, "causal_conv1d_qkv")),
    "qwen3_5, FSDP": Run("qwen3_5", operators=(*RULE, "causal_conv1d_qkv")),
    "qwen3_5, padded, FSDP": Run("qwen3_5", more=(PADDED,), operators=RULE),
    "qwen3_5, Ulysses": Run("qwen3_5", more=(PACKED, ULYSSES), operators=RULE),
    "qwen3_5, pictures": Run("qwen3_5", "pictures", operators=RULE),
    "qwen3_5_moe": Run("qwen3_5_moe", operators=RULE),
}


def agree(found: verl_runs.Steps, truth: verl_runs.Steps) -> None:
    assert len(truth.losses) == 3 and truth.losses[0] > truth.losses[2]
    assert found.losses == pytest.approx(truth.losses, **CLOSE)
    assert found.norms == pytest.approx(truth.norms, **CLOSE)


def test_qwen3_with_ulysses(tmp_path):
    """Small enough for `make test`: attention exchanges tokens and heads over HCCL."""
    verl_runs.write_models(tmp_path, ("qwen3",))
    run = RUNS["qwen3"]
    lines = run.overrides(tmp_path, OURS, PACKED, ULYSSES)
    found = verl_runs.run(tmp_path, "npu_ops", {"run": lines})["run"]
    lines = {"truth": run.without_packing(tmp_path, EAGER)}
    agree(found, verl_runs.run(tmp_path, "truth", lines)["truth"])
    layers, batches = 2, 6
    for calls in found.calls:
        assert calls["attention"] == calls["apply_rotary_pos_emb"] == layers * batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    verl_runs.write_models(folder, tuple(verl_data.MODELS))
    return folder


@pytest.fixture(scope="module")
def truth(folder):
    """Return the results of the reference runs on the CPU."""
    runs = {run.truth: run.without_packing(folder, EAGER) for run in RUNS.values()}
    return verl_runs.run(folder, "truth", runs)


@pytest.fixture(scope="module")
def ours(folder):
    """Return the results with npu-ops.

    "saved" has two steps and a checkpoint, and "resumed" the third step from that checkpoint.
    """
    runs = {name: run.overrides(folder, OURS, *run.more) for name, run in RUNS.items()}
    saved = f"trainer.default_local_dir={folder / 'saved'}"
    runs["saved"] = RUNS["qwen3"].overrides(
        folder, OURS, PACKED, saved, "trainer.total_training_steps=2"
    )
    runs["resumed"] = RUNS["qwen3"].overrides(
        folder, OURS, PACKED, saved, "trainer.resume_mode=auto"
    )
    return verl_runs.run(folder, "npu_ops", runs)


@pytest.fixture(scope="module")
def shipped(folder):
    """Return the results of verl on NPUs without npu-ops: flash attention by torch_npu."""
    runs = {run.truth: run.without_packing(folder, FLASH) for run in RUNS.values()}
    return verl_runs.run(folder, "shipped", runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_with_npu_ops(name, ours, truth):
    agree(ours[name], truth[RUNS[name].truth])
    for calls in ours[name].calls:
        missing = [operator for operator in RUNS[name].operators if not calls.get(operator)]
        assert not missing, calls


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({run.truth for run in RUNS.values()}))
def test_with_verls_patches(name, shipped, truth):
    agree(shipped[name], truth[name])
    for calls in shipped[name].calls:
        assert calls["npu_rms_norm"] and calls["npu_cross_entropy_loss"], calls
        assert not any(operator in calls for operator in RULE)


@pytest.mark.slow
def test_resuming_goes_on_where_it_was_saved(ours, truth):
    steps = truth[RUNS["qwen3"].truth]
    for name, part in (("saved", slice(0, 2)), ("resumed", slice(2, 3))):
        assert ours[name].losses == pytest.approx(steps.losses[part], **CLOSE)
        assert ours[name].norms == pytest.approx(steps.norms[part], **CLOSE)
