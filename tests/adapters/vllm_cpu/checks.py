"""Check the adapter with vllm-ascend 0.18.0; print a line of JSON for each check, [name, error].

python -m vllm_cpu.checks

Our functions are compared with vllm-ascend's own, which ours wrap.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import pathlib
import pkgutil
import re
import sys
from unittest import mock

import torch
from outcomes import error_of
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_cpu import stand_ins
from vllm_cpu.layers import DRAFTED, Pools, metadata, run

WORKER = "vllm_ascend.patch.worker"
MODULES = (
    *(
        f"{WORKER}.patch_{name}"
        for name in ("triton", "gdn_attn", "qwen3_next", "qwen3_5", "qwen3vl")
    ),
    "vllm_ascend.ops.layernorm",
    "vllm_ascend.ops.register_custom_ops",
)
ABSENT = {"vllm.third_party.flash_linear_attention.ops.l2norm"}
CORES = (
    f"{WORKER}.patch_qwen3_next.Qwen3NextGatedDeltaNet",
    f"{WORKER}.patch_qwen3_5.Qwen3_5GatedDeltaNet",
)
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def close(ours, theirs, tolerance=4e-3):
    torch.testing.assert_close(
        ours.float(), theirs.float(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def states(found=None):
    import npu_ops_adapters

    found = found or (*npu_ops_adapters.plan(), *npu_ops_adapters.verify())
    found = {(row.target, row.op): row.sentence for row in found}
    return {
        key: said for key, said in found.items() if key[0].startswith(("vllm.", "vllm_ascend."))
    }


def load_plugins():
    """Load our plugin as a starting vLLM process does, by the entry point in pyproject.toml."""
    importlib.import_module("vllm.plugins")  # its imports use entry points of their own
    group = "vllm.general_plugins"
    project = (pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text()
    (value,) = re.findall(rf'entry-points."{group}"]\nnpu_ops = "(.+)"', project)
    found = [importlib.metadata.EntryPoint("npu_ops", value, group)]
    with mock.patch("importlib.metadata.entry_points", lambda group: found):
        importlib.import_module("vllm.plugins").load_general_plugins()


@check
def every_patch_of_this_version_is_applied():
    found = states()
    waiting = {target.partition(":")[0] for (target, _), s in found.items() if "not imported" in s}
    assert waiting == ABSENT, found
    others = {key: said for key, said in found.items() if key[0].partition(":")[0] not in ABSENT}
    assert set(others.values()) == {"applied"} and len(others) == 19, others


@check
def vllm_and_the_models_hold_ours():
    for dotted in (
        "vllm.model_executor.layers.fla.ops.chunk_gated_delta_rule",
        "vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update",
        f"{WORKER}.patch_qwen3_5.fused_recurrent_gated_delta_rule",
        f"{WORKER}.patch_qwen3_5.fused_gdn_gating_patch",
        f"{WORKER}.patch_qwen3_next.l2norm_fwd",
    ):
        assert pkgutil.resolve_name(dotted).__module__.startswith("npu_ops_adapters."), dotted


def both(slots, step, dtype=torch.float32):
    """Yield both models' step by our method and by theirs; other slots must stay unchanged."""
    for dotted in CORES:
        cls = pkgutil.resolve_name(dotted)
        ours, theirs = Pools.make(slots, dtype), Pools.make(slots, dtype)
        with Calls() as counted:
            o = run(cls._forward_core, cls, ours, step)
        with as_it_was():
            assert not hasattr(cls._forward_core, "__wrapped__")
            expected = run(cls._forward_core, cls, theirs, step)
        yield dotted, counted.found, (o, ours), (expected, theirs)


class Calls(TorchDispatchMode):
    """Records the npu-ops operators that are called within the block."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, _, name = function.name().partition("::")
        self.found += [name] * (namespace == "npu_ops")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_it_was():
    """Revert npu-ops' patches within the block, so that vllm-ascend runs its own functions.

    vllm-ascend's chunked gated delta rule uses Triton extensions that the interpreter lacks. The
    block runs vllm-ascend's PyTorch version for the 310P instead.
    """
    import npu_ops_adapters

    undone = states(npu_ops_adapters.revert())
    assert set(undone.values()) == {"reverted"}, undone
    own = importlib.import_module("vllm_ascend._310p.ops.fla.chunk_gated_delta_rule")

    def chunked(prebuilt_meta, **call):
        return own.chunk_gated_delta_rule_pytorch(**call)

    with contextlib.ExitStack() as stack:
        for model in ("qwen3_next", "qwen3_5"):
            name = f"{WORKER}.patch_{model}.chunk_gated_delta_rule"
            stack.enter_context(mock.patch(name, chunked))
        yield
    npu_ops_adapters.apply()


def compare(slots, step, wanted, tolerance=4e-3, dtype=torch.float32):
    for dotted, counted, (o, ours), (expected, theirs) in both(slots, step, dtype):
        assert counted == wanted, (dotted, counted)
        close(o, expected, tolerance)
        close(ours.conv, theirs.conv, 0)
        close(ours.states, theirs.states, tolerance)


DECODE = ["causal_conv1d_update", "gated_delta_rule_update"]
PREFILL = ["causal_conv1d", "gdn_gate", "chunk_gated_delta_rule"]


@check
def a_decoding_step_is_two_launches():
    compare([3, 7, 5], metadata([1, 1, 1], [9, 70, 1], [3, 7, 5]), DECODE)


@check
def a_decoding_step_of_a_graph_has_padding():
    step = metadata([1, 1, 1], [9, 70, 1], [3, 7, 5], tokens=4, graph=True)
    assert step.non_spec_state_indices_tensor.tolist() == [3, 7, 5, -1]
    cls = pkgutil.resolve_name(CORES[0])
    pools, wanted = Pools.make([3, 7, 5]), Pools.make([3, 7, 5])
    o = run(cls._forward_core, cls, pools, step)
    plain = metadata([1, 1, 1], [9, 70, 1], [3, 7, 5])
    assert o[:3].equal(run(cls._forward_core, cls, wanted, plain)) and not o[3].any()
    close(pools.conv, wanted.conv, 0)
    close(pools.states, wanted.states, 0)


@check
def a_prefill_begins_with_zeros_or_goes_on():
    compare([7, 2], metadata([70, 5, 3], [0, 64, 9], [4, 7, 2]), PREFILL)


@check
def decoding_sequences_come_before_prefills():
    compare([7, 2], metadata([1, 1, 66], [9, 30, 0], [7, 2, 4]), DECODE + PREFILL)


SLOTS = [[3, 7, 5], [1, 2, 8]]


@check
def drafted_tokens_are_verified():
    step = metadata([3, 2], [9, 20], SLOTS, accepted=[2, 3])
    assert step.num_spec_decodes == 2 and SLOTS[0][DRAFTED] == 5
    compare(SLOTS, step, DECODE)


@check
def a_prefill_stands_beside_drafted_tokens():
    step = metadata([3, 40, 2], [9, 0, 20], [SLOTS[0], [4, 0, 0], SLOTS[1]], accepted=[1, 0, 3])
    assert step.num_prefills == 1 and step.num_spec_decodes == 2
    compare(SLOTS, step, DECODE + PREFILL)


def start():
    """Start like a process of vLLM, up to importing the models' modules."""
    stand_ins.install()
    load_plugins()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("vllm_ascend.ops.triton.triton_utils").init_device_properties_triton()
    stand_ins.for_the_interpreter("vllm_ascend.ops.triton.fla")


def main():
    from vllm_cpu import functions, rotary

    start()
    for function in (*CHECKS, *functions.CHECKS, *rotary.CHECKS):
        print(json.dumps([function.__name__, error_of(function)]), flush=True)


if __name__ == "__main__":
    sys.modules["vllm_cpu.checks"] = sys.modules["__main__"]  # functions.py imports it
    main()
