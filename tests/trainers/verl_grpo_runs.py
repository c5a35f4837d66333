"""Starts verl_grpo.py on the emulated NPU or on the CPU, and reads its results."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping

import fetch_sglang
import fetch_vllm
import verl_runs
from verl_runs import FP32, HERE

ACTOR, REFERENCE, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
MODEL = "actor_rollout_ref.model"
# By default Ray's workers run at nice 15, and are killed when memory runs low.
RAY = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
ANSWERS, LENGTH = 4, 16  # answers per prompt, and most tokens of an answer
METRICS = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean")


@dataclasses.dataclass(frozen=True)
class Steps:
    """The results of a run.

    metrics: verl's, per step, by name.
    passes: per step, log-probabilities of the actor before its update, then of the reference. Each
      maps a sequence's tokens to its log-probabilities.
    sampled: per step, the largest difference between the actor's and the rollout's probabilities.
    calls: counted calls of each worker.
    said: the output of all processes.
    """

    metrics: Mapping[str, tuple[float, ...]]
    passes: tuple[Mapping[str, list[float]], ...]
    sampled: tuple[float, ...]
    calls: tuple[Mapping[str, int], ...]
    said: str


def overrides(folder: pathlib.Path, model: str, attention: str, *more: str, data="text") -> list:
    """Return settings for verl: 3 steps of 4 prompts in fp32, with two updates each.

    The second update starts where the first ended, so the ratio of the policies is not 1.
    """
    both = (ACTOR, REFERENCE)
    return [
        f"{MODEL}.path={folder / model}",
        f"{MODEL}.external_lib=verl_worker",
        f"+{MODEL}.override_config.attn_implementation={attention}",
        f"{MODEL}.enable_gradient_checkpointing=False",
        *(f"+{part}.fsdp_config.mixed_precision={FP32}" for part in both),
        *(f"{part}.fsdp_config.model_dtype=fp32" for part in both),
        *(f"{part}.use_torch_compile=False" for part in both),
        *(f"{part}.fsdp_config.use_torch_compile=False" for part in both),
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.1",
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=transformers",
        f"{ROLLOUT}.n={ANSWERS}",
        f"{ROLLOUT}.agent.num_workers=1",
        f"data.train_files={folder / data}_prompts.parquet",
        f"data.val_files={folder / data}_prompts.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=128",
        f"data.max_response_length={LENGTH}",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={HERE / 'verl_reward.py'}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.logger=[file]",
        "trainer.total_training_steps=3",
        "trainer.total_epochs=1",
        "trainer.resume_mode=disable",
        "trainer.val_before_train=False",
        *more,
    ]


SGLANG = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "grammar_backend": "none", "disable_overlap_schedule": True, "disable_radix_cache": True,
    "chunked_prefill_size": -1, "max_total_tokens": 4096, "enable_memory_saver": False,
}  # fmt: skip


def with_sglang() -> list[str]:
    """Return settings for SGLang's engine on the CPU; the actor sends even its first weights."""
    return [
        f"{MODEL}.external_lib=verl_sglang",
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.enforce_eager=True",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.max_num_seqs=16",
        f"{ROLLOUT}.load_format=dummy",
        *(f"+{ROLLOUT}.engine_kwargs.sglang.{name}={value}" for name, value in SGLANG.items()),
    ]


def beside_sglang(folder: pathlib.Path, path: str) -> dict[str, str]:
    """Return variables: SGLang's packages come after `path`, this environment's Triton first."""
    folder.mkdir()
    triton = importlib.util.find_spec("triton").submodule_search_locations[0]
    (folder / "triton").symlink_to(triton)
    path = os.pathsep.join([str(folder), path, str(fetch_sglang.tree())])
    return {"PYTHONPATH": path, "SGLANG_PLATFORM": "sglang_npu"}


VLLM = {"num_gpu_blocks_override": 64, "block_size": 128}
FOR_DELTA_NET = [  # no packing: verl does not pass cu_seqlens to Qwen3-Next's layers
    f"{MODEL}.use_remove_padding=False",
    f"+{ROLLOUT}.engine_kwargs.vllm.mamba_ssm_cache_dtype=float32",
]


def with_vllm(dtype: str, eager: bool) -> list[str]:
    """Return settings for vLLM's engine on the actor's emulated NPU.

    Its sleep mode is off, because that needs a library of CANN.
    """
    return [
        f"{MODEL}.external_lib=verl_vllm",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.dtype={dtype}",
        f"{ROLLOUT}.free_cache_engine=False",
        f"+{ROLLOUT}.enable_sleep_mode=False",
        f"{ROLLOUT}.enforce_eager={eager}",
        f"{ROLLOUT}.gpu_memory_utilization=0.1",
        f"{ROLLOUT}.max_model_len=512",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        f"{ROLLOUT}.max_num_seqs=16",
        f"{ROLLOUT}.load_format=dummy",
        *(f"+{ROLLOUT}.engine_kwargs.vllm.{name}={value}" for name, value in VLLM.items()),
    ]


def beside_vllm() -> dict[str, str]:
    """Return variables of all processes. As in a user's install, verl uses vLLM's transformers."""
    path = [*map(str, fetch_vllm.server()), verl_runs.variables()["PYTHONPATH"]]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "VERL_USE_EXTERNAL_MODULES": "verl_without_ipc",
        "CUDA_VISIBLE_DEVICES": "",  # empty: vLLM uses Triton even if no driver is active yet
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_DEDUP_LOGS": "0",  # keep repeated lines: the server logs a line per operator call
    }


def on(workers: int) -> list[str]:
    """Return settings that tell Ray about the NPUs, because it would look for them in /dev."""
    ray = {"address": "local", "include_dashboard": False, "object_store_memory": 200_000_000}
    return [
        f"trainer.n_gpus_per_node={workers}",
        f"{ROLLOUT}.tensor_model_parallel_size={workers}",  # one server for all workers
        "ray_kwargs.ray_init.num_cpus=16",
        f"+ray_kwargs.ray_init.resources={{NPU:{workers}}}",
        *(f"+ray_kwargs.ray_init.{name}={value}" for name, value in ray.items()),
    ]


def run(
    folder: pathlib.Path,
    who: str,
    name: str,
    lines: list[str],
    answers: str,
    workers: int,
    **changes: str,
) -> Steps:
    """Run verl; return the results. answers: a file that "truth" writes and the others read."""
    results = folder / f"grpo_{who}" / name
    results.parent.mkdir(exist_ok=True)
    options = {"record": folder / answers, "results": results, "replays": who != "truth"}
    given = ",".join(f"{key}:{value}" for key, value in options.items())
    command = [
        *(sys.executable, str(HERE / "verl_grpo.py"), *lines, *on(workers)),
        f"+{ROLLOUT}.engine_kwargs.transformers={{{given}}}",
    ]
    # Names of sockets are limited to 107 characters, which include Ray's folder.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray:
        files = {"VERL_FILE_LOGGER_PATH": f"{results}.jsonl", "RAY_TMPDIR": ray}
        said = verl_runs.finish_as(who, workers, command, GRPO_WHO=who, **RAY, **files, **changes)
    return read(results, said)


def read(results: pathlib.Path, said: str) -> Steps:
    lines = results.with_suffix(".jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    files = sorted(results.parent.glob(f"{results.name}.*.json"))
    workers = [json.loads(file.read_text()) for file in files]
    passes = zip(*(worker["passes"] for worker in workers), strict=True)
    return Steps(
        {metric: tuple(step[metric] for step in steps) for metric in METRICS},
        tuple({tokens: row for part in parts for tokens, row in part.items()} for parts in passes),
        tuple(step["training/rollout_probs_diff_max"] for step in steps),
        tuple(worker["calls"] for worker in workers),
        said,
    )
