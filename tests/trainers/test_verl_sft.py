"""verl's SFT trainer with its NPU patches, with npu-ops instead, and the truth from the CPU.

Two ranks, three steps in fp32: losses and gradient norms of each agree to rounding. What ran is
counted on each rank. `make test-trainers`; one run of each kind is in `make test`.
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
CLOSE = {"rel": 2e-5}


@dataclasses.dataclass(frozen=True)
class Run:
    """A model on text or pictures, how npu-ops runs it, and which of its operators then compute."""

    model: str
    data: str = "text"
    more: tuple[str, ...] = (PACKED,)
    operators: tuple[str, ...] = ("apply_rotary_pos_emb", "attention")

    @property
    def truth(self) -> str:
        return f"{self.model}_{self.data}"


RULE = ("apply_rotary_pos_emb", "attention", "chunk_gated_delta_rule", "rms_norm_gated")
RUNS = {
    "qwen3": Run("qwen3"),
    "qwen3, padded": Run("qwen3", more=(PADDED, FSDP2)),
    "qwen3_moe": Run("qwen3_moe", more=(PACKED, FSDP2)),
    "qwen3_vl": Run("qwen3_vl", "pictures"),
    "qwen3_vl, Ulysses": Run("qwen3_vl", "pictures", (PACKED, ULYSSES)),
    "qwen3_vl_moe": Run("qwen3_vl_moe", "pictures"),
    "qwen3_next": Run("qwen3_next", more=(PADDED,), operators=RULE),
    "qwen3_5": Run("qwen3_5", more=(PACKED, FSDP2), operators=(*RULE, "causal_conv1d_qkv")),
    "qwen3_5, Ulysses": Run("qwen3_5", more=(PACKED, ULYSSES), operators=RULE),
    "qwen3_5, pictures": Run("qwen3_5", "pictures", operators=RULE),
    "qwen3_5_moe": Run("qwen3_5_moe", operators=RULE),
}


def agree(found: verl_runs.Steps, truth: verl_runs.Steps) -> None:
    assert len(truth.losses) == 3 and truth.losses[0] > truth.losses[2]
    assert found.losses == pytest.approx(truth.losses, **CLOSE)
    assert found.norms == pytest.approx(truth.norms, **CLOSE)


def truths(folder, models) -> dict[str, verl_runs.Steps]:
    """Each model on each of its data, on the CPU. Packed sequences of Gated Delta Net are not the
    truth there: without fla, verl and transformers carry states from one to the next."""
    runs = {}
    for run in RUNS.values():
        if run.model in models:
            padding = PADDED if run.model in DELTA_NET else PACKED
            runs[run.truth] = verl_runs.overrides(folder, run.model, EAGER, padding, data=run.data)
    return verl_runs.run(folder, "truth", runs)


def test_qwen3_with_ulysses(tmp_path):
    """Small enough for every day: attention exchanges tokens and heads over HCCL."""
    verl_runs.write_models(tmp_path, ("qwen3",))
    lines = verl_runs.overrides(tmp_path, "qwen3", OURS, PACKED, ULYSSES)
    found = verl_runs.run(tmp_path, "npu_ops", {"run": lines})["run"]
    agree(found, truths(tmp_path, ("qwen3",))["qwen3_text"])
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
    return truths(folder, tuple(verl_data.MODELS))


@pytest.fixture(scope="module")
def ours(folder):
    return verl_runs.run(
        folder,
        "npu_ops",
        {
            name: verl_runs.overrides(folder, run.model, OURS, *run.more, data=run.data)
            for name, run in RUNS.items()
        },
    )


@pytest.fixture(scope="module")
def shipped(folder):
    """As verl is on an NPU today: flash attention by torch_npu."""
    runs = {}
    for run in RUNS.values():
        padding = PADDED if run.model in DELTA_NET else PACKED
        runs[run.truth] = verl_runs.overrides(folder, run.model, FLASH, padding, data=run.data)
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
