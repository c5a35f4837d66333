"""Run verl's SFT trainer on its Megatron engine with MindSpeed, on the emulated NPU.

    git clone --branch core_r0.16.0 https://gitcode.com/Ascend/MindSpeed
    git clone https://github.com/ISEEKYAN/mbridge
    python tests/trainers/upstream_verl_megatron.py MindSpeed --megatron 0.16.1 --mbridge mbridge

Three steps without and with npu-ops, on one rank, and with tensor and sequence parallelism on two.
Losses and gradient norms must be those of verl's FSDP engine on the CPU, and npu-ops' operators
must have been called. `--megatron` is as for tests/adapters/upstream_mindspeed.py; its stand-ins
are used here. Without a clone of mbridge, its release is used, which has only Qwen3 and Qwen3-MoE.
The exit status is 1 on a difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))

import fetch_megatron
import fetching
import verl_runs

MBRIDGE = fetching.CACHE / "trainers" / "mbridge-0.15.1"
PACKED, PADDED = (f"model.use_remove_padding={value}" for value in (True, False))
# Megatron applies no weight decay to norms, but FSDP's optimizer does.
DECAY = "optim.weight_decay=0"
DELTA_NET = ("chunk_gated_delta_rule", "causal_conv1d", "rms_norm_gated", "l2norm")
OPERATORS = ("apply_rotary_pos_emb_freqs", "attention", "bias_dropout_add")
CLOSE = 2e-5


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on text or pictures, and the npu-ops operators that it must call.

    alone: settings that MindSpeed needs without npu-ops.
    ranks: numbers of ranks, one run for each.
    """

    data: str = "text"
    packing: str = PACKED
    operators: tuple[str, ...] = OPERATORS
    alone: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)


RUNS = {
    "qwen3": Run(),
    "qwen3_moe": Run(),
    # On two ranks, mbridge's split_deepstack_embs loses the gradients of the other rank's tokens.
    "qwen3_vl_3": Run("pictures", ranks=(1,)),
    # Gated Delta Net of Megatron 0.16 rejects packed sequences, and MindSpeed's delta rule supports
    # only bf16.
    "qwen3_5": Run(
        packing=PADDED,
        operators=(*OPERATORS, *DELTA_NET),
        alone=("+engine.override_transformer_config.deterministic_mode=True",),
    ),
}


def overrides(folder: pathlib.Path, model: str, ranks: int) -> list[str]:
    """Return the FSDP run's settings, with Megatron's engine in place of its own."""
    run = RUNS[model]
    kept = [
        line
        for line in verl_runs.overrides(folder, model, "eager", run.packing, data=run.data)
        if not line.startswith(("+engine.", "+model.", "model.enable", "engine.use_torch"))
    ]
    return [
        "engine=megatron",
        "optim=megatron",
        "engine.vanilla_mbridge=True",
        "engine.use_distributed_optimizer=False",
        f"engine.tensor_model_parallel_size={ranks}",
        f"engine.sequence_parallel={ranks > 1}",
        "checkpoint.save_contents=[]",
        DECAY,
        *kept,
    ]


def difference(found: verl_runs.Steps, truth: verl_runs.Steps) -> float:
    """Return the largest relative difference of losses and gradient norms."""
    pairs = zip((*found.losses, *found.norms), (*truth.losses, *truth.norms), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def compare(folder: pathlib.Path, model: str) -> bool:
    run = RUNS[model]
    lines = verl_runs.overrides(folder, model, "eager", run.packing, DECAY, data=run.data)
    truth = verl_runs.run(folder, "truth", {model: lines}, ranks=1)[model]
    print(f"{model}: losses {truth.losses}, norms {truth.norms}", flush=True)
    right = True
    for who in ("shipped", "npu_ops"):
        for ranks in run.ranks:
            name = f"{model}_{ranks}"
            more = run.alone if who == "shipped" else ()
            lines = {name: [*overrides(folder, model, ranks), *more]}
            found = verl_runs.run(folder, who, lines, ranks, "verl_megatron.py")[name]
            error = difference(found, truth)
            computed = [all(calls.get(name) for name in run.operators) for calls in found.calls]
            right &= error < CLOSE and all(ours == (who == "npu_ops") for ours in computed)
            print(f"  {who}, {ranks} ranks: {error:.1e}, calls {found.calls[0]}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clone", type=pathlib.Path, help="a clone of MindSpeed")
    parser.add_argument("--megatron", default="0.16.1", help="a release, or a folder")
    parser.add_argument("--mbridge", type=pathlib.Path, help="a clone; otherwise release 0.15.1")
    parser.add_argument("--models", nargs="+", choices=RUNS, help="all")
    options = parser.parse_args()
    megatron = pathlib.Path(options.megatron)
    megatron = megatron if megatron.exists() else fetch_megatron.tree(options.megatron)
    mbridge = options.mbridge or MBRIDGE
    fetching.install(mbridge, "mbridge==0.15.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (options.clone, megatron, mbridge)))
    names = options.models or (list(RUNS) if options.mbridge else ["qwen3", "qwen3_moe"])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        verl_runs.write_models(folder, names)
        return int(not all([compare(folder, model) for model in names]))


if __name__ == "__main__":
    sys.exit(main())
