"""The demo's training data, and that its comparison detects differences."""

import sys

import pytest
import torch
from npu_ops_tools import demo, demo_data
from npu_ops_tools.demo import Side
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

FALLING = [3.0 - 0.1 * step for step in range(20)]


def side(*losses, hybrid=FALLING, patches=1, calls=4, hybrid_calls=6):
    operators = {"gpt": {"npu_ops::rope": calls}, "hybrid": {"npu_ops::l2norm": hybrid_calls}}
    return Side(
        {"gpt": [list(run) for run in losses], "hybrid": [list(hybrid)]},
        {"patches": [{"op": "rope", "state": "applied"}] * patches, "operators": operators},
    )


def shifted(*by):
    return [[loss + offset for loss in FALLING] for offset in by]


ALONE = side(FALLING, *shifted(0.0, 0.01, -0.01, 0.005), patches=0, calls=0, hybrid_calls=0)
FAIR = shifted(0.002, 0.012, -0.012, 0.004)


def test_equal_sides_pass():
    checks = demo.compare(ALONE, side(FALLING, *FAIR))
    assert all(check.passed for check in checks) and len(checks) == 5


@pytest.mark.parametrize(
    "ours, failing",
    [
        (side(FALLING, *FAIR, calls=0), "npu-ops ran in one of the two trainings only"),
        (side(FALLING, *FAIR, hybrid_calls=0), "npu-ops ran in one of the two trainings only"),
        (side(FALLING, *FAIR, patches=0), "npu-ops ran in one of the two trainings only"),
        (side(FALLING, FALLING[::-1], *shifted(0, 0, 0)), "the loss decreases in every run"),
        (side(FALLING, *FAIR, hybrid=FALLING[::-1]), "the loss decreases in every run"),
        (side(*shifted(0.001), *FAIR), "equal without dropout: GPT"),
        (
            side(FALLING, *FAIR, hybrid=shifted(0.001)[0]),
            "equal without dropout: Gated Delta Net and attention 3:1",
        ),
        (side(FALLING, *shifted(0.5, 0.51, 0.49, 0.5)), "alike with dropout 0.1"),
    ],
)
def test_different_sides_fail(ours, failing):
    assert failing in [check.name for check in demo.compare(ALONE, ours) if not check.passed]


@pytest.mark.parametrize(
    "files, hybrid", [(["ssm/gated_delta_net.py"], 1), (["ssm/gated_delta_net/gdn.py"], 1), ([], 0)]
)
def test_the_hybrid_trains_where_megatron_has_gated_delta_net(tmp_path, monkeypatch, files, hybrid):
    for name in ("__init__.py", *files):
        path = tmp_path / "megatron" / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    models = [model for model, *_ in demo.runs_of(seeds=2)]
    assert models == ["gpt"] * 3 + ["hybrid"] * hybrid
    assert (demo.why_no_hybrid() is None) == bool(hybrid)


def test_positions_are_qwen3_vls():
    """Compare with transformers, which numbers the tokens of a prompt with one image."""
    config = Qwen3VLConfig()
    config.vision_config.spatial_merge_size = 1
    grid, text = torch.full((3, 5), demo_data.FIRST_COLOUR), torch.arange(7)
    tokens, positions = demo_data.prompt(grid, text)
    types = (tokens >= demo_data.FIRST_COLOUR).int()[None]
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    expected, _ = model.get_rope_index(
        tokens[None], mm_token_type_ids=types, image_grid_thw=torch.tensor([[1, 3, 5]])
    )
    assert torch.equal(positions, expected[:, 0])


def test_batches_are_reproducible_and_differ_from_sample_to_sample():
    first, again = (demo_data.batches(2, 3, 400, seed=5) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["tokens"].shape == (2, 3, 401) and first["positions"].shape == (2, 3, 3, 400)
    assert int(first["tokens"].max()) < demo_data.VOCABULARY
    samples = first["positions"].transpose(1, 2).flatten(0, 1)
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) > 1
    picture = first["tokens"][..., :-1] >= demo_data.FIRST_COLOUR
    rows = first["positions"].transpose(1, 2)[picture[:, :, None].expand(-1, -1, 3, -1)]
    assert picture.any() and rows.numel() == 3 * int(picture.sum())
