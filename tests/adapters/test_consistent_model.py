"""NPU_OPS_CONSISTENT: all logits of a model are the same bits in training and with a cache."""

import subprocess
import sys

import pytest
from processes import HERE, environment

ON = {
    "cpu": [sys.executable],
    "npu": [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python"],
}


def different(device, dtype, mode) -> list[int]:
    """Logits of a prompt and of decoded tokens that are not training's, and how many there are."""
    done = subprocess.run(
        [*ON[device], str(HERE / "consistent_model.py"), dtype, device],
        env=environment(HERE, NPU_OPS_CONSISTENT=mode, OMP_NUM_THREADS="1"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(number) for number in done.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_a_prompt_and_decoding_agree_in_every_bit(device, dtype):
    assert different(device, dtype, "1") == [0, 0, 2 * 58 * 600]


def test_without_the_setting_they_do_not():
    prompt, decoded, _ = different("cpu", "bfloat16", "0")
    assert decoded > 1000
