"""What `npu-ops model` says of other projects' Triton kernels, beside ours of the same job.

    python benchmarks/model_peers.py SGL_KERNEL_NPU [NAME ...]

The first argument is a checkout of sgl-kernel-npu; no file of it is changed or copied. Each job's
rows, theirs and ours, go into results/npu-model/peers.csv. Nothing in it was measured:
docs/npu-model.md. Their wrappers are called as SGLang calls them, with tables that are gathered
already; ours gathers none there either.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.machinery
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

import model_ops
import torch
from npu_ops_emulator import vendor
from npu_ops_tools import model
from npu_ops_tools.compile.launches import recorded

from npu_ops.core import cases

RESULTS = model_ops.RESULTS.with_name("peers.csv")
FIELDS = ("job", "project", "version", *model_ops.FIELDS[1:])
CORES = 24, 48  # of model_ops.SOC
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Job:
    """A function of theirs by module and name, its arguments, and a case of ours."""

    theirs: str
    arguments: Callable[[], dict]
    op: str
    case: str
    tokens: int

    def launches(self) -> dict[str, list]:
        with recorded("") as found:
            module, _, name = self.theirs.partition(":")
            getattr(importlib.import_module(f"sgl_kernel_npu.{module}"), name)(**self.arguments())
        found = [dataclasses.replace(x, options=_known(x.options)) for x in found]
        chosen = next(case for case in cases.of(self.op).CASES if case.name == self.case)
        chosen = dataclasses.replace(chosen, tokens=self.tokens)
        function, inputs = cases.function(self.op, chosen), chosen.inputs(BF16)
        ours = model.of_call("", model_ops.SOC, function, inputs)  # forward alone: theirs has none
        return {"sgl-kernel-npu": found, "npu-ops": ours}


def _known(options: tuple) -> tuple:
    """Those of Triton for NVIDIA mean nothing to Ascend's compiler."""
    return tuple(x for x in options if x[0] not in ("num_warps", "num_stages"))


def rows(tokens: int, width: int) -> torch.Tensor:
    return torch.empty(tokens, width, dtype=BF16)


def split(tokens: int) -> Callable[[], dict]:
    """Qwen3-8B's."""
    return lambda: {
        "input": rows(tokens, 48 * 128), "sin": rows(tokens, 128).view(-1, 1, 1, 128),
        "cos": rows(tokens, 128).view(-1, 1, 1, 128), "q_hidden_size": 32 * 128,
        "kv_hidden_size": 8 * 128, "head_dim": 128, "eps": 1e-6, "q_weight": rows(1, 128)[0],
        "k_weight": rows(1, 128)[0],
    }  # fmt: skip


def split_with_gate(tokens: int) -> Callable[[], dict]:
    """Qwen3-Next's."""
    return lambda: {
        "input": rows(tokens, 36 * 256), "sin": rows(tokens, 64).view(-1, 1, 1, 64),
        "cos": rows(tokens, 64).view(-1, 1, 1, 64), "q_hidden_size": 16 * 256,
        "kv_hidden_size": 2 * 256, "head_dim": 256, "rope_dim": 64, "eps": 1e-6,
        "q_weight": rows(1, 256)[0], "k_weight": rows(1, 256)[0],
    }  # fmt: skip


def split_by_sections(tokens: int) -> Callable[[], dict]:
    """Qwen3.5-9B's."""
    return lambda: {
        "qkv": rows(tokens, 40 * 256), "q_weight": rows(1, 256)[0], "k_weight": rows(1, 256)[0],
        "cos_sin": rows(3 * tokens, 64).view(3, tokens, 64), "num_q_heads": 16, "num_kv_heads": 4,
        "head_size": 256, "eps": 1e-6, "mrope_section": [11, 11, 10], "is_interleaved": True,
        "rope_dim": 64, "has_gate": True,
    }  # fmt: skip


def gates(tokens: int) -> Callable[[], dict]:
    return lambda: {
        "A_log": torch.zeros(32), "a": rows(tokens, 32), "b": rows(tokens, 32),
        "dt_bias": torch.zeros(32),
    }  # fmt: skip


NORM = "norm.split_qkv_rmsnorm_rope"
JOBS = {
    **{
        f"qk_norm_rope Qwen3-8B T={tokens}": Job(
            f"{NORM}:split_qkv_rmsnorm_rope", split(tokens), "qk_norm_rope", "qwen3-8b-t64", tokens
        )
        for tokens in (32, 512, 8192)
    },
    **{
        f"qk_norm_rope Qwen3-Next T={tokens}": Job(
            f"{NORM}:split_qkvgate_gemma_rmsnorm_rope", split_with_gate(tokens), "qk_norm_rope",
            "qwen3-next-80b-a3b-t64", tokens,
        )
        for tokens in (32, 8192)
    },
    "qk_norm_rope Qwen3.5-9B T=8192": Job(
        "norm.split_qkv_rmsnorm_mrope:triton_split_qkv_rmsnorm_mrope", split_by_sections(8192),
        "qk_norm_rope", "qwen3.5-9b-t64", 8192,
    ),
    "l2norm Qwen3-Next T=8192": Job(
        "fla.l2norm:l2norm_fwd", lambda: {"x": rows(16 * 8192, 128)}, "l2norm",
        "qwen3-next-tp1-t8192", 8192,
    ),
    "gdn_gate Qwen3-Next T=8192": Job(
        "fla.fused_gdn_gating:fused_gdn_gating_npu", gates(8192), "gdn_gate",
        "qwen3-next-tp1-t8192", 8192,
    ),
}  # fmt: skip


def import_from(checkout: pathlib.Path) -> str:
    """Make `sgl_kernel_npu` importable without its compiled half and an NPU; its version."""
    vendor.frontend()
    import triton
    import triton.language as tl

    home = str(checkout / "python" / "sgl_kernel_npu" / "sgl_kernel_npu")
    _module("sgl_kernel_npu", __path__=[home])
    _module("sgl_kernel_npu.utils.triton_utils", get_device_properties=lambda: CORES)
    # Where a later triton-ascend than there is on PyPI has what 3.2.0 has in triton.language.
    slices = {name: getattr(tl, name) for name in ("extract_slice", "insert_slice", "get_element")}
    _module("triton.language.extra.cann", __path__=[])
    _module("triton.language.extra.cann.extension", **slices)
    known = {"num_aicore": CORES[0], "num_vectorcore": CORES[1]}
    properties = types.SimpleNamespace(get_device_properties=lambda device: known)
    triton.runtime.driver.set_active(types.SimpleNamespace(utils=properties))
    torch.npu = types.SimpleNamespace(current_device=lambda: 0)
    said = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always"], capture_output=True, text=True
    )
    return said.stdout.strip()


def _module(name: str, **contents) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="__path__" in contents)
    sys.modules[name] = module


def of_job(name: str, version: str):
    """A row for each kernel."""
    for project, found in JOBS[name].launches().items():
        for said in model.predict_all(found, model_ops.SOC):
            own = project == "npu-ops"
            labels = {"job": name, "project": project, "version": "" if own else version}
            yield labels | model_ops.row_of(said)


def main(checkout: str, names: list[str]) -> None:
    version = import_from(pathlib.Path(checkout))
    for name in names or JOBS:
        found = list(of_job(name, version))
        kept = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        kept = [row for row in kept if row["job"] != name] + found
        kept.sort(key=lambda row: list(JOBS).index(row["job"]))
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        for row in found:
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
