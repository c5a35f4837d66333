"""With NPU_OPS_CONSISTENT logits have the same bits in training, with a cache, and in Megatron."""

import subprocess
import sys

import fetch_megatron
import fetch_verl
import pytest
from processes import HERE, environment

ON = {
    "cpu": [sys.executable],
    "npu": [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python"],
}


def different(device, dtype, mode) -> list[int]:
    """Return how many prompt logits and decoded logits differ from training, and the number of all
    logits."""
    return numbers(device, mode, "consistent_model.py", dtype)


def numbers(device, mode, script, *arguments, path=()) -> list[int]:
    done = subprocess.run(
        [*ON[device], str(HERE / script), *map(str, arguments), device],
        env=environment(HERE, *path, NPU_OPS_CONSISTENT=mode, OMP_NUM_THREADS="1"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(number) for number in done.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_training_a_prompt_and_decoding_agree_in_every_bit(device, dtype):
    assert different(device, dtype, "1") == [0, 0, 2 * 58 * 600]


def test_without_the_setting_they_do_not():
    prompt, decoded, _ = different("cpu", "bfloat16", "0")
    assert decoded > 1000


@pytest.mark.parametrize(
    "model, device, release",
    [
        ("qwen3", "cpu", "0.12.3"), ("qwen3_5", "npu", "0.18.2"), ("qwen3_moe", "npu", "0.16.1"),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in (
                ("qwen3", "cpu", "0.19.2"), ("qwen3", "npu", "0.16.1"),
                ("qwen3_5", "cpu", "0.16.1"), ("qwen3_5", "cpu", "0.19.2"),
                ("qwen3_moe", "cpu", "0.19.2"),
            )
        ),
    ],
)  # fmt: skip
def test_megatrons_packed_sequences_are_transformers_in_every_bit(model, device, release):
    """On an NPU Megatron runs torch_npu's norm and activation, unlike transformers."""
    script = "consistent_megatron.py", fetch_megatron.tree(release), model, "bfloat16"
    assert numbers(device, "1", *script) == [0, 100 * 96, 0]


@pytest.mark.parametrize("model", ["qwen3_5", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_megatrons_gradients_are_transformers(model):
    script = "consistent_megatron.py", fetch_megatron.tree("0.19.2"), model, "float32"
    assert numbers("cpu", "1", *script) == [0, 100 * 96, 0]


def test_megatrons_are_not_without_the_setting():
    script = "consistent_megatron.py", fetch_megatron.tree("0.16.1"), "qwen3_5", "bfloat16"
    assert numbers("cpu", "0", *script)[0] > 1000


def test_verls_patches_for_npus_give_experts_the_same_bits():
    """Without NPU_OPS_CONSISTENT 6321 logits differ."""
    found = numbers("npu", "1", "consistent_verl.py", "bfloat16", path=fetch_verl.path())
    assert found == [0, 100 * 96, 0]
