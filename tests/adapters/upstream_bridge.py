"""Runs a tiny Qwen3-VL of Megatron-Bridge on the CPU, without npu-ops and with it.

    git clone https://github.com/NVIDIA-NeMo/Megatron-Bridge
    python tests/adapters/upstream_bridge.py Megatron-Bridge --megatron 0.19.2

`--megatron` is a release that tests/adapters/fetch_megatron.py downloaded, or a folder. Bridge's
modules of Qwen3-VL are its own files, read in place. Its packages' `__init__.py` do not run, as
they import all its models. Megatron's own layers replace Transformer Engine's. Megatron's
DotProductAttention takes no packed sequences, which the vision tower has; without npu-ops, torch's
attention of one picture at a time replaces it.

Losses and all gradients are compared for text, for two pictures, and with activation checkpointing,
which without npu-ops loses gradients. The exit status is 1 on a difference, or if npu-ops was not
called.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.abc
import importlib.machinery
import pathlib
import subprocess
import sys
import tempfile
import types

import counting
import fetch_megatron
import megatron_cpu
import torch
import upstream_megatron
from processes import environment

HERE = pathlib.Path(__file__).parent
MODELLING = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
OPERATORS = ("apply_rotary_pos_emb_freqs", "attention", "bias_dropout_add")
CASES = ("text", "pictures", "text, recomputed", "pictures, recomputed")
# frames, height and width of two pictures in patches; 2 x 2 patches merge into a token
GRID = torch.tensor([[1, 4, 4], [1, 4, 6]])
IMAGE, VISION_START = 120, 121


# Stand-ins for packages that are not installed


class Bare(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Bridge's packages, and does not run their `__init__.py`."""

    def __init__(self, source: pathlib.Path):
        self._source = source

    def find_spec(self, name, path=None, target=None):
        folder = self._source.joinpath(*name.split("."))
        if name.startswith("megatron.bridge") and (folder / "__init__.py").exists():
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        return None


def without_transformer_engine(model) -> None:
    """Use Megatron's own modules where Bridge's model requests Transformer Engine's."""
    from megatron.core import tensor_parallel
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    attention = importlib.import_module(f"{MODELLING}.attention")
    attention.TEDotProductAttention = type("TEDotProductAttention", (), {})  # no layer is one
    model.TENorm = WrappedTorchNorm
    model.TEColumnParallelLinear = tensor_parallel.ColumnParallelLinear
    model.TERowParallelLinear = tensor_parallel.RowParallelLinear
    local = vit_layer_specs.get_vit_layer_with_local_spec
    model.get_vit_layer_with_transformer_engine_spec = local


def without_packed_attention() -> None:
    """Compute one picture at a time where Megatron's attention gets packed sequences."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    whole = DotProductAttention.forward

    @functools.wraps(whole)
    def forward(self, query, key, value, attention_mask, **options):
        packed = options.pop("packed_seq_params", None)
        if packed is None:
            return whole(self, query, key, value, attention_mask, **options)
        ends = packed.cu_seqlens_q.tolist()
        settings = {"scale": self.softmax_scale, "is_causal": self.attn_mask_type.name == "causal"}
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1) for x in (query, key, value)), enable_gqa=True, **settings
            ).transpose(0, 1)
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        return torch.cat(parts).flatten(1)

    DotProductAttention.forward = forward


# The model


def build(recompute: bool):
    """Return a model with two text and three vision layers, of which two are
    deepstack's, in fp32."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = importlib.import_module(f"{MODELLING}.model")
    kind = importlib.import_module(f"{MODELLING}.transformer_config").Qwen3VLTransformerConfig
    without_transformer_engine(model)
    settings = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = megatron_cpu.transformer_config(
        "mrope",
        kind,
        **(settings | {"recompute_num_layers": 1} if recompute else {}),
        mrope_section=[4, 2, 2],
        kv_channels=16,
        normalization="RMSNorm",
        add_bias_linear=False,
        vocab_size=128,
        language_max_sequence_length=64,
        image_token_id=IMAGE,
        video_token_id=119,
        vision_start_token_id=VISION_START,
    )
    vision = types.SimpleNamespace(
        depth=3,
        hidden_size=32,
        num_heads=2,
        intermediate_size=64,
        patch_size=2,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        num_position_embeddings=64,
        out_hidden_size=64,
        deepstack_visual_indexes=[0, 2],
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return megatron_cpu.randomise_biases(model.Qwen3VLModel(config, spec, vision))


def inputs(pictures: bool) -> dict:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (2, 24), generator=draw)
    given = {"input_ids": tokens, "labels": tokens.clone(), "loss_mask": torch.ones(2, 24)}
    if pictures:
        for row, count in enumerate((GRID.prod(-1) // 4).tolist()):
            tokens[row, 5] = VISION_START
            tokens[row, 6 : 6 + count] = IMAGE
        patches = int(GRID.prod(-1).sum())
        given["pixel_values"] = torch.randn(patches, 3 * 2 * 2 * 2, generator=draw)
        given["image_grid_thw"] = GRID
    return given


def step(case: str) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradient of every parameter that has one, by name."""
    model = build("recomputed" in case)
    model.train()
    loss = model(**inputs("pictures" in case))
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.mean().backward()
    named = model.named_parameters()
    return {"loss": loss.detach()} | {n: p.grad for n, p in named if p.grad is not None}


# One run, in another process


def run(clone: pathlib.Path, ours: bool, output: str) -> None:
    upstream_megatron.without_triton()
    upstream_megatron.without_python_312()
    sys.meta_path.insert(0, Bare(clone / "src"))
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *message: None
    megatron_cpu.start()
    if not ours:
        without_packed_attention()
    calls = counting.count_calls(OPERATORS)
    results = {}
    for case in CASES:
        calls.clear()
        results[case] = (step(case), dict(calls))
    if ours:
        in_force()
    torch.save(results, output)


def in_force() -> None:
    """Check that every patch is applied, also where Bridge imports by value."""
    import npu_ops_adapters

    states = {
        row.target: row.sentence for row in npu_ops_adapters.plan() + npu_ops_adapters.verify()
    }
    wrong = [s for s in states.items() if s[1].startswith(("refused", "overwritten", "captured"))]
    assert wrong == [], wrong
    for name in ("rope", "attention"):
        function = importlib.import_module(f"{MODELLING}.{name}").apply_rotary_pos_emb_absolute
        assert function.__name__ == "npu_ops_rope", function


def results(clone: pathlib.Path, megatron: pathlib.Path, ours: bool) -> dict:
    settings = {"NPU_OPS_DISABLE": "" if ours else "all", "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = str(pathlib.Path(folder) / "results.pt")
        subprocess.run(
            [sys.executable, __file__, str(clone), "--run", str(int(ours)), output],
            env=environment(
                HERE, clone / "src", megatron, TORCH_DEVICE_BACKEND_AUTOLOAD="1", **settings
            ),
            check=True,
        )
        return torch.load(output)


# The report


def difference(expected: dict, got: dict) -> tuple[float, list[str]]:
    """Return the largest difference, relative to a tensor's maximum, and missing gradients."""
    missing = sorted(expected.keys() - got.keys())
    parts = [
        float((got[name] - x).abs().max() / x.abs().max().clamp(min=1e-6))
        for name, x in expected.items()
        if name in got
    ]
    return max(parts), missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clone", type=pathlib.Path, help="a clone of Megatron-Bridge")
    parser.add_argument("--megatron", default="0.19.2", help="a release, or a folder")
    # whether with npu-ops, and the file for results
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.clone.resolve(), options.run[0] == "1", options.run[1])
        return 0
    folder = pathlib.Path(options.megatron)
    folder = folder if folder.exists() else fetch_megatron.tree(options.megatron)
    theirs, ours = (results(options.clone.resolve(), folder, with_us) for with_us in (False, True))
    failed = False
    for case in CASES:
        expected, _ = theirs[case.partition(",")[0]]  # computed without checkpointing
        got, calls = ours[case]
        largest, missing = difference(expected, got)
        wrong = largest > 1e-4 or missing or min(calls.get(name, 0) for name in OPERATORS) == 0
        failed |= bool(wrong)
        print(f"{case:22} {len(expected) - 1} gradients, largest difference {largest:.1e}", calls)
        lost = difference(expected, theirs[case][0])[1]
        print("", f"without a gradient: with npu-ops {missing or 'none'}; without it {len(lost)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
