"""Run `npu-ops model` on other projects' Triton kernels and on ours for the same job.

    python benchmarks/model_peers.py [--sgl CHECKOUT] [--vllm CHECKOUT] [--liger CHECKOUT]
        [--fla CHECKOUT] [--mindspeed CHECKOUT] [NAME ...]
    python benchmarks/model_peers.py --vllm-released FOLDER_WITH_THE_WHEEL [NAME ...]

Each job's rows, ours and those of the given projects, go into results/npu-model/peers.csv; rows of
other projects stay. All times are predictions, none was measured: docs/npu-model.md. Wrappers are
called as their frameworks call them, with tables that are already gathered; our calls use gathered
tables too. Of tuned kernels, the first configuration is used.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import model_ops
import peer_delta_rule
import peer_projects
import torch
from npu_ops_emulator import vendor
from npu_ops_tools import model

from npu_ops.core import cases

RESULTS = model_ops.RESULTS.with_name("peers.csv")
FIELDS = ("job", "project", "version", *model_ops.FIELDS[1:])
BF16, rows = torch.bfloat16, peer_delta_rule.rows


Function = tuple[str, Callable[[], dict]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A forward of an op, and the functions of other projects that do the same.

    op, case, tokens: npu-ops' call.
    theirs: command-line option of a project -> its function, or several that run in this order. A
    function is ("module:name", a function that makes the arguments).
    """

    op: str
    case: str
    tokens: int
    theirs: dict[str, Function | list[Function]]

    def ours(self) -> list:
        chosen = next(case for case in cases.of(self.op).CASES if case.name == self.case)
        chosen = dataclasses.replace(chosen, tokens=self.tokens)
        function, inputs = cases.function(self.op, chosen), chosen.inputs(BF16)
        return model.of_call("", model_ops.SOC, function, inputs)


@dataclasses.dataclass(frozen=True)
class Call:
    """Like `Job`, but npu-ops' call is one of model_ops.CALLS."""

    call: str
    theirs: dict[str, list[Function]]

    def ours(self) -> list:
        return model_ops.CALLS[self.call]()


def split(tokens: int) -> Callable[[], dict]:
    """Return a function that makes arguments with the sizes of Qwen3-8B."""
    return lambda: {
        "input": rows(tokens, 48 * 128), "sin": rows(tokens, 1, 1, 128),
        "cos": rows(tokens, 1, 1, 128), "q_hidden_size": 32 * 128, "kv_hidden_size": 8 * 128,
        "head_dim": 128, "eps": 1e-6, "q_weight": rows(128), "k_weight": rows(128),
    }  # fmt: skip


def split_with_gate(tokens: int) -> Callable[[], dict]:
    """Return a function that makes arguments with the sizes of Qwen3-Next."""
    return lambda: {
        "input": rows(tokens, 36 * 256), "sin": rows(tokens, 1, 1, 64),
        "cos": rows(tokens, 1, 1, 64), "q_hidden_size": 16 * 256, "kv_hidden_size": 2 * 256,
        "head_dim": 256, "rope_dim": 64, "eps": 1e-6, "q_weight": rows(256), "k_weight": rows(256),
    }  # fmt: skip


def split_by_sections(tokens: int) -> Callable[[], dict]:
    """Return a function that makes arguments with the sizes of Qwen3.5-9B."""
    return lambda: {
        "qkv": rows(tokens, 40 * 256), "q_weight": rows(256), "k_weight": rows(256),
        "cos_sin": rows(3, tokens, 64), "num_q_heads": 16, "num_kv_heads": 4,
        "head_size": 256, "eps": 1e-6, "mrope_section": [11, 11, 10], "is_interleaved": True,
        "rope_dim": 64, "has_gate": True,
    }  # fmt: skip


def gates(tokens: int) -> dict:
    return {
        "A_log": torch.zeros(32), "a": rows(tokens, 32), "b": rows(tokens, 32),
        "dt_bias": torch.zeros(32),
    }  # fmt: skip


def heads_first(tokens: int, *tables: int) -> dict:
    """Return q and k of Qwen3-VL-8B as in transformers, heads first, and tables of equal width."""
    q, k = (rows(1, tokens, heads, 128).transpose(1, 2) for heads in (32, 8))
    return {"q": q, "k": k} | {n: rows(*tables, tokens, 128) for n in ("cos", "sin")}


def gated(tokens: int, gate: str, bias: str = "bias") -> dict:
    """Return arguments for Qwen3-Next's gated norm."""
    shape = 32 * tokens, 128
    return {
        "x": rows(*shape), gate: rows(*shape), "weight": rows(128), bias: None, "eps": 1e-6,
        "is_rms_norm": True,
    }  # fmt: skip


SGL, VLLM = "sgl_kernel_npu", "vllm_ascend.ops.triton"
LIGER = "liger_kernel.ops.backends._ascend.ops"
FLA, MINDSPEED = "fla.modules.backends.triton_ascend", "mindspeed.ops.triton"
SPLIT = "norm.split_qkv_rmsnorm_rope"
T = 8192
JOBS = {
    f"rope Qwen3-VL-8B T={T}": Job("rope", "qwen3-vl-8b-tp1-t512", T, {
        "vllm": (f"{VLLM}.rope:rope_forward_triton", lambda: {
            "q": rows(T, 32, 128), "k": rows(T, 8, 128), "cos": rows(T, 64), "sin": rows(T, 64),
        }),
        "liger": (f"{LIGER}.rope:rope_forward", lambda: heads_first(T, 1)),
        "fla": [
            (f"{FLA}.rotary:rotary_embedding_fwdbwd_npu", lambda heads=heads: {
                "x": rows(1, T, heads, 128), "cos": rows(T, 64), "sin": rows(T, 64),
            })
            for heads in (32, 8)
        ],
    }),
    f"mrope Qwen3-VL-8B T={T}": Job("mrope", "qwen3-vl-8b-tp1-t8192", T, {
        "liger": (f"{LIGER}.qwen2vl_mrope:qwen2vl_mrope_forward", lambda: {
            **heads_first(T, 3, 1), "mrope_section": [24, 20, 20],
        }),
    }),
    **{
        f"qk_norm_rope Qwen3-8B T={tokens}": Job("qk_norm_rope", "qwen3-8b-t64", tokens, {
            "sgl": (f"{SGL}.{SPLIT}:split_qkv_rmsnorm_rope", split(tokens)),
        })
        for tokens in (32, 512, T)
    },
    **{
        f"qk_norm_rope Qwen3-Next T={tokens}": Job(
            "qk_norm_rope", "qwen3-next-80b-a3b-t64", tokens,
            {"sgl": (f"{SGL}.{SPLIT}:split_qkvgate_gemma_rmsnorm_rope", split_with_gate(tokens))},
        )
        for tokens in (32, T)
    },
    f"qk_norm_rope Qwen3.5-9B T={T}": Job("qk_norm_rope", "qwen3.5-9b-t64", T, {
        "sgl": (
            f"{SGL}.norm.split_qkv_rmsnorm_mrope:triton_split_qkv_rmsnorm_mrope",
            split_by_sections(T),
        ),
    }),
    f"l2norm Qwen3-Next T={T}": Job("l2norm", "qwen3-next-tp1-t8192", T, {
        "sgl": (f"{SGL}.fla.l2norm:l2norm_fwd", lambda: {"x": rows(16 * T, 128)}),
        "vllm": (f"{VLLM}.fla.l2norm:l2norm_fwd", lambda: {"x": rows(16 * T, 128)}),
        "fla": (f"{FLA}.l2norm:l2norm_fwd_npu", lambda: {"x": rows(16 * T, 128)}),
        "mindspeed": (f"{MINDSPEED}.l2norm:l2norm_fwd", lambda: {"x": rows(16 * T, 128)}),
    }),
    f"rms_norm_gated Qwen3-Next T={T}": Job("rms_norm_gated", "qwen3-next-tp1-t8192", T, {
        "sgl": (f"{SGL}.fla.layernorm_gated:layer_norm_fwd_npu", lambda: gated(T, "z")),
        "vllm": (f"{VLLM}.layernorm_gated:layer_norm_fwd_npu", lambda: gated(T, "z")),
        "fla": (f"{FLA}.fused_norm_gate:layer_norm_gated_fwd_npu", lambda: gated(T, "g")),
        "mindspeed": (f"{MINDSPEED}.fused_norm_gate:layer_norm_gated_fwd", lambda: gated(T, "g")),
    }),
    f"gdn_gate Qwen3-Next T={T}": Job("gdn_gate", "qwen3-next-tp1-t8192", T, {
        "sgl": (f"{SGL}.fla.fused_gdn_gating:fused_gdn_gating_npu", lambda: gates(T)),
        "vllm": (f"{VLLM}.fused_gdn_gating:fused_gdn_gating_patch", lambda: gates(T)),
    }),
    **{
        name: Call(name, peer_delta_rule.chunked(*sizes))
        for sizes in model_ops.CHUNKED
        for name in [model_ops.chunked(*sizes)]
    },
    **{
        f"gated_delta_rule_update B={batch} HV=32": Call(
            f"gated_delta_rule_update B={batch} HV=32", peer_delta_rule.decoding(batch, 16, 32)
        )
        for batch in (1, 16, 64, 256)
    },
    "causal_conv1d Qwen3-Next T=4096": Job(
        "causal_conv1d", "qwen3-next-t4096", 4096, peer_delta_rule.convolution(4096, 8192)
    ),
    "causal_conv1d_update Qwen3-Next B=32": Job(
        "causal_conv1d_update", "qwen3-next-b32", 1, peer_delta_rule.convolution_step(32, 8192)
    ),
}  # fmt: skip


def of_job(name: str, versions: dict[str, str]) -> Iterator[dict]:
    """Yield the rows of a job: one for each of our kernels and of the kernels of other projects."""
    job = JOBS[name]
    yield from _rows(name, "npu-ops", "", job.ours())
    for option, functions in job.theirs.items():
        if option in versions:
            for function, arguments in [functions] if isinstance(functions, tuple) else functions:
                found = peer_projects.launches(function, arguments())
                yield from _rows(name, peer_projects.PROJECTS[option][0], versions[option], found)


def _rows(job: str, project: str, version: str, launches: list) -> Iterator[dict]:
    """Yield a row for each kernel; a kernel that does not compile has no time."""
    labels = {"job": job, "project": project, "version": version}
    for launch in launches:
        try:
            row = labels | model_ops.row_of(model.predict(launch, model_ops.SOC))
        except (vendor.CompileError, model.Unknown) as error:
            unknown = isinstance(error, model.Unknown)
            said = "refused: unknown to the model" if unknown else "does not compile"
            row = labels | {"kernel": launch.name, "soc": model_ops.SOC, "label": model.LABEL}
            row |= {"bottleneck": said}
            print(str(error)[:300])
        print(*(row.get(name, "") for name in ("job", "project", "kernel", "us")), flush=True)
        yield row


def save(name: str, found: list[dict]) -> None:
    """Replace the stored rows of a job and the same projects by `found`."""
    kept = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
    made = {(row["job"], row["project"]) for row in found}
    found = found + [row for row in kept if (row["job"], row["project"]) not in made]
    order, projects = list(JOBS), ["npu-ops", *(x[0] for x in peer_projects.PROJECTS.values())]
    found.sort(key=lambda row: (order.index(row["job"]), projects.index(row["project"])))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, (project, _, _) in peer_projects.PROJECTS.items():
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(flag, type=pathlib.Path, help=f"a checkout of {project}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="jobs; default: all")
    options = vars(parser.parse_args())
    names = options.pop("names")
    versions = peer_projects.import_from({n: path for n, path in options.items() if path})
    for name in names or JOBS:
        save(name, list(of_job(name, versions)))


if __name__ == "__main__":
    main()
