"""Runs Megatron-LM's unit tests of functions that npu-ops replaces, on the CPU.

    git clone https://github.com/NVIDIA/Megatron-LM
    python tests/adapters/upstream_megatron.py Megatron-LM

The tests are written for CUDA, so the Python files of the checkout, Megatron's and the tests', are
read with "cpu" for "cuda" and "gloo" for "nccl" at import; no file is changed. Tests that still
need a GPU, several processes or Transformer Engine fail or are skipped in every run, and are listed
with their reasons.

Files in RANKED also run in four processes (gloo), started as by torchrun.

There are three runs: `without` npu-ops, `with` it, and `against`. In `against` the functions to
which tests compare others are Megatron's; otherwise tests would compare npu-ops with itself. The
exit status is 1 if a test passes only without npu-ops, or if no call reached npu-ops.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import datetime
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import pathlib
import socket
import sys
import types
import typing

import counting
import pytest
import runs

TESTS = "tests/unit_tests"
FILES = (
    "fusions/test_bias_dropout_fusion.py",
    "fusions/test_mla_yarn_rope_apply.py",
    "inference/test_flash_decode.py",
    "models/test_heterogeneous_gpt_model.py",
    "ssm/test_gated_delta_net.py",
    "ssm/test_gated_delta_net_inference.py",
    "transformer/test_attention_no_rope.py",
    "transformer/test_rope.py",
    "transformer/test_transformer_block.py",
    "transformer/test_transformer_layer.py",
)
# These files have cases for two and four ranks, and run on four ranks too.
RANKS = 4
RANKED = ("ssm/test_gated_delta_net.py", "transformer/test_attention.py")
PATIENCE = datetime.timedelta(minutes=1)
OPERATORS = (
    "apply_rotary_pos_emb_freqs",
    "attention",
    "bias_dropout_add",
    *counting.DELTA_NET,
)
RUNS = {"without": "all", "with": "", "against": ""}  # NPU_OPS_DISABLE of each run
REFERENCES = (
    ("megatron.core.fusions.fused_bias_dropout", "bias_dropout_add_unfused"),
    ("megatron.core.models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd"),
)


# Read CUDA in the sources as the CPU


class OnCpu(ast.NodeTransformer):
    """Replaces CUDA by the CPU: `torch.cuda.f()`, `x.cuda(0)`, `device="cuda"` and `x.is_cuda`."""

    STRINGS: typing.ClassVar = {
        **{"cuda": "cpu", "cuda:": "cpu:", "cuda:0": "cpu", "nccl": "gloo"},
        **{f"torch.cuda.{x}Tensor": f"torch.{x}Tensor" for x in ("Float", "Half", "BFloat16")},
    }
    ATTRIBUTES: typing.ClassVar = {"cuda": "cpu", "is_cuda": "is_cpu"}

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = self.STRINGS.get(node.value, node.value)
        return node

    def visit_Attribute(self, node):
        node.attr = self.ATTRIBUTES.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.args, node.keywords = [], []  # `x.cpu()` takes no device
        return self.generic_visit(node)

    def visit_keyword(self, node):
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node):
        node.module = "torch.cpu" if node.module == "torch.cuda" else node.module
        return node


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        """Compile the source each time: cached code in __pycache__ still has CUDA."""
        path = self.get_filename(fullname)
        tree = OnCpu().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


def read_on_cpu(checkout: pathlib.Path) -> None:
    def hook(folder):
        if not pathlib.Path(folder).resolve().is_relative_to(checkout):
            raise ImportError("not upstream's: for the other hooks")
        return importlib.machinery.FileFinder(folder, (Loader, [".py"]))

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def complete_torch_cpu() -> None:
    """Give `torch.cpu` the functions of `torch.cuda`; other names, e.g. types, are torch.cuda's."""
    import torch

    here = torch.cpu.current_device()
    torch.cpu.__getattr__ = lambda name: getattr(torch.cuda, name)
    torch.cpu.default_generators = {here: torch.default_generator}
    torch.cpu.device = lambda device: contextlib.nullcontext()
    torch.cpu.get_device_capability = lambda device=None: (0, 0)
    torch.cpu.get_device_name = lambda device=None: here
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cpu.is_current_stream_capturing = lambda: False
    torch.cpu.manual_seed = torch.cpu.manual_seed_all = torch.manual_seed
    torch.cpu.nvtx = types.SimpleNamespace(range=contextlib.nullcontext)
    torch.cpu.random = torch.cpu
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cpu._lazy_call = lambda callback: callback()
    torch.cpu._lazy_init = lambda: None


# Other stand-ins for packages that are not installed


class NoTriton:
    """Replaces Triton's driver, which upstream's @triton.autotune needs at import."""

    @staticmethod
    def get_benchmarker():
        return NoTriton.launch

    @staticmethod
    def get_current_target():
        return types.SimpleNamespace(backend="cpu", arch="none")

    @staticmethod
    def launch(*args, **kwargs):
        pytest.skip("launches a Triton kernel, which needs a GPU")

    def __getattr__(self, name):
        self.launch()


def without_triton() -> None:
    with contextlib.suppress(ImportError):
        from triton.runtime import driver

        driver.set_active(NoTriton())


def without_python_312() -> None:
    """Define `typing.override`, which upstream's main branch imports."""
    import typing_extensions

    typing.override = typing_extensions.override


def without_transformer_engine() -> None:
    """Use Megatron's own layers where a test requests Transformer Engine's."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    for kind in ("spec", "submodules"):
        local = getattr(specs, f"get_gpt_layer_local_{kind}", None)
        if local:
            setattr(specs, f"get_gpt_layer_with_transformer_engine_{kind}", local)
    with contextlib.suppress(ImportError):  # from 0.16 on
        name = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
        importlib.import_module(name).TESpecProvider = local_provider()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def norm(cls, config, *args, **options):
        # Sequence parallelism changes which rank sums a norm's gradients, but not the result.
        config = copy.copy(config)
        config.sequence_parallel = False
        return make(cls, config, *args, **options)

    WrappedTorchNorm.__new__ = staticmethod(norm)

    # Activation recomputation asks Transformer Engine whether fp8 is on, even for bf16.
    off = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.FP8GlobalStateManager = getattr(random, "FP8GlobalStateManager", off)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        if not hasattr(random, name):
            setattr(random, name, lambda **options: contextlib.nullcontext())


def local_provider() -> type:
    """Return modules with the arguments of Transformer Engine's, for linear attention layers.

    Transformer Engine's projection also normalises its input; this one does not, in any run.
    """
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Centred(torch.nn.RMSNorm):
        """The stored weight is the factor minus 1."""

        def reset_parameters(self):
            torch.nn.init.zeros_(self.weight)

        def forward(self, x):
            weight = 1 + self.weight
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    class Norm:
        def __new__(cls, config, hidden_size, eps):
            kind = Centred if config.layernorm_zero_centered_gamma else torch.nn.RMSNorm
            return kind(hidden_size, eps)

    class Provider(LocalSpecProvider):
        def column_parallel_layer_norm_linear(self):
            return ColumnParallelLinear

        def layer_norm(self, rms_norm=False, **options):
            return Norm if rms_norm else super().layer_norm(**options)

    return Provider


def without_triton_updates() -> None:
    """Write a server's state pools with torch; Megatron has only a Triton kernel for it."""
    with contextlib.suppress(ImportError):
        name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
        importlib.import_module(name).tensor_masked_update = masked_update


def masked_update(states, idx, new_states) -> None:
    """Skip rows of -1, and convert to the pool's dtype as a kernel's store does."""
    states[idx[idx >= 0].long()] = new_states[idx >= 0].to(states.dtype)


def with_little_patience() -> None:
    """Shorten the timeout: if a rank fails, the others wait for half an hour by default."""
    from torch import distributed

    def hasty(function):
        @functools.wraps(function)
        def call(*args, timeout=None, **options):
            return function(*args, timeout=PATIENCE, **options)

        return call

    for name in ("init_process_group", "new_group"):
        setattr(distributed, name, hasty(getattr(distributed, name)))


def with_closed_groups() -> None:
    """Close each finished test's process groups: gloo keeps threads for every open group."""
    from megatron.core import parallel_state
    from torch import distributed

    forget = parallel_state.destroy_model_parallel

    @functools.wraps(forget)
    def destroy():
        forget()
        if distributed.is_initialized():
            for group in list(distributed.distributed_c10d._world.pg_map):
                if group is not distributed.group.WORLD:
                    distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy


def with_references() -> None:
    """Restore Megatron's own functions to which its tests compare others."""
    for module, name in REFERENCES:
        module = importlib.import_module(module)
        setattr(module, name, inspect.unwrap(getattr(module, name)))


class Fixtures:
    """The fixtures of upstream's conftest.py that tests request by name."""

    @pytest.fixture(scope="session")
    def tmp_path_dist_ckpt(self):
        """Return a folder for checkpoints that all ranks share."""
        return pathlib.Path.cwd() / "checkpoints"


# One run, in another process


def run_tests(name: str, checkout: pathlib.Path, files: list[str], output: str) -> None:
    read_on_cpu(checkout)
    complete_torch_cpu()
    without_triton()
    without_python_312()
    without_triton_updates()
    with_little_patience()
    with_closed_groups()
    without_transformer_engine()
    if name == "against":
        with_references()
    record = runs.Record(OPERATORS)
    record.count_calls()
    # Skip upstream's conftest.py, because it downloads data, and upstream's pytest settings. pytest
    # must not rewrite assertions, as that would bypass our loader.
    root = checkout / TESTS
    options = ["-q", "--noconftest", "--assert=plain", "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={root}"]
    paths = [str(root / file) for file in files if (root / file).exists()]
    pytest.main([*options, *paths], plugins=[record, Fixtures()])
    pathlib.Path(output).write_text(json.dumps(record.report()))


def run(name: str, checkout: pathlib.Path, files: list[str], ranks: int) -> dict:
    settings = {
        "NPU_OPS_DISABLE": RUNS[name],
        "TORCH_COMPILE_DISABLE": "1",  # compiling takes minutes, and happens only without npu-ops
        "MASTER_PORT": str(free_port()),
    }
    return runs.run(__file__, name, checkout, files, checkout, settings, ranks)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of Megatron-LM")
    parser.add_argument("files", nargs="*", help=f"in its {TESTS}; for four ranks, if in RANKED")
    # the run's name, and its report's file
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if options.run:
        name, output = options.run
        return run_tests(name, checkout, options.files, output)
    wrong = 0
    for files, ranks in ((FILES, 1), (RANKED, RANKS)):
        chosen = [file for file in files if file in (options.files or files)]
        if chosen:
            print(f"\n{ranks} rank{'s' * (ranks > 1)}")
            wrong += compared(checkout, chosen, ranks)
    return int(wrong > 0)


def compared(checkout: pathlib.Path, files: list[str], ranks: int) -> int:
    """Run and compare. With several ranks each file runs alone: a waiting rank
    would end all tests."""
    groups = [files] if ranks == 1 else [[file] for file in files]
    reports = {}
    for name in RUNS:
        parts = [run(name, checkout, group, ranks) for group in groups]
        reports[name] = {
            "tests": {test: end for part in parts for test, end in part["tests"].items()},
            "calls": {file: n for part in parts for file, n in part["calls"].items()},
        }
    return runs.compare(reports, files)


if __name__ == "__main__":
    sys.exit(main())
