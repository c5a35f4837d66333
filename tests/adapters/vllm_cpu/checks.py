"""Check the adapter with vllm-ascend; print a line of JSON for each check, [name, error].

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
import types
from unittest import mock

import torch
from outcomes import error_of
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_cpu import stand_ins
from vllm_cpu.layers import DRAFTED, Pools, builder, metadata, run
from vllm_cpu.versions import ABSENT, CHUNKED, CORES, MODULES, OLDER, VERSION, WORKER, has, only

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
    older = (
        f"{WORKER}.patch_qwen3_5.fused_recurrent_gated_delta_rule",
        f"{WORKER}.patch_qwen3_5.fused_gdn_gating_patch",
        f"{WORKER}.patch_qwen3_next.l2norm_fwd",
    )
    later = (
        "vllm_ascend.ops.gdn.chunk_gated_delta_rule",
        "vllm_ascend.ops.gdn.l2norm_fwd",
        "vllm.model_executor.models.qwen3_next.QwenGatedDeltaNetAttention._forward_core",
    )
    for dotted in (
        "vllm.model_executor.layers.fla.ops.chunk_gated_delta_rule",
        "vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update",
        *(older if OLDER else later),
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


def own_chunked(*heads, initial_state, **call):
    """Run vllm-ascend's chunked rule in PyTorch, which is for the 310P.

    A state is `[keys, values]`, as for the rule's kernels. In 0.23.0 the function has values first.
    """
    home = importlib.import_module("vllm_ascend._310p.ops.fla.chunk_gated_delta_rule")
    before = initial_state if OLDER else initial_state.transpose(-1, -2)
    o, after = home.chunk_gated_delta_rule_pytorch(*heads, initial_state=before, **call)
    return o, after if OLDER else after.transpose(-1, -2)


@contextlib.contextmanager
def as_it_was():
    """Revert npu-ops' patches within the block, so that vllm-ascend runs its own functions.

    0.23.0 has set one of its functions over npu-ops' replacement of vLLM's.

    vllm-ascend's chunked gated delta rule uses Triton extensions that the interpreter lacks. The
    block runs vllm-ascend's PyTorch version for the 310P instead.
    """
    import npu_ops_adapters

    undone = states(npu_ops_adapters.revert())
    over = f"overwritten by {WORKER}.patch_qwen3vl._fast_pos_embed_interpolate"
    assert {"reverted"} <= set(undone.values()) <= {"reverted", over}, undone

    def chunked(prebuilt_meta, **call):
        return own_chunked(**call)

    with contextlib.ExitStack() as stack:
        for module in CHUNKED:
            stack.enter_context(mock.patch(f"{module}.chunk_gated_delta_rule", chunked))
        if not OLDER:
            alone = types.SimpleNamespace(world_size=1)
            stack.enter_context(mock.patch("vllm_ascend.ops.gdn.get_pcp_group", lambda: alone))
        stack.callback(npu_ops_adapters.apply)
        yield


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
@only("0.18.0")
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
@only("0.23.0")
def a_graph_of_a_decoding_step_reads_the_buffers_of_each_step():
    """Its padding has slot 0, which is vLLM's empty block."""
    cls, by = pkgutil.resolve_name(CORES[0]), builder(graph=True)
    captured = metadata([1] * 4, [1] * 4, [0] * 4, by=by)
    metadata([1, 1, 1, 0], [9, 70, 1, 0], [3, 7, 5, 0], tokens=3, by=by)
    assert captured.non_spec_state_indices_tensor.tolist() == [3, 7, 5, 0]
    assert captured.non_spec_query_start_loc.tolist() == [0, 1, 2, 3, 3]
    plain = metadata([1, 1, 1], [9, 70, 1], [3, 7, 5])
    replay_is(cls, captured, plain, [3, 7, 5])


def replay_is(cls, captured, plain, slots):
    """Check that a graph's step computes a plain step, in slots other than 0 and in its rows."""
    ours, wanted = Pools.make(slots), Pools.make(slots)
    o, right = (
        run(cls._forward_core, cls, ours, captured),
        run(cls._forward_core, cls, wanted, plain),
    )
    assert o[: len(right)].equal(right)
    close(ours.conv[1:], wanted.conv[1:], 0)
    close(ours.states[1:], wanted.states[1:], 0)


@check
@only("0.23.0")
def a_graph_of_drafted_tokens_reads_the_buffers_of_each_step():
    """A step with one of two sequences, then one without any, which must change no slot."""
    cls, by = pkgutil.resolve_name(CORES[0]), builder(True, graph=True)
    captured = metadata([3, 3], [1, 1], [[0] * 3] * 2, accepted=[1, 1], by=by)
    metadata([3, 0], [9, 0], [SLOTS[0], [0] * 3], tokens=3, accepted=[2, 0], by=by)
    assert captured.spec_state_indices_tensor.tolist() == [SLOTS[0], [0] * 3]
    plain = metadata([3], [9], [SLOTS[0]], accepted=[2])
    replay_is(cls, captured, plain, SLOTS[0])
    metadata([1, 1], [5, 6], [1, 2], by=by)
    assert captured.spec_state_indices_tensor.eq(-1).all()
    pools, before = Pools.make(SLOTS), Pools.make(SLOTS)
    run(cls._forward_core, cls, pools, captured)
    close(pools.conv, before.conv, 0)
    close(pools.states, before.states, 0)


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


@check
@only("0.23.0")
def the_end_of_a_prompt_may_be_verified_like_drafts():
    """vllm-ascend's builder does so beside drafts if there are as many tokens. It then names the
    slot behind them, which a prefill has not written: npu-ops computes the same as vllm-ascend.
    """
    step = metadata([3, 3], [9, 10], SLOTS, accepted=[2, 0])
    assert step.num_prefills == 0 and step.num_accepted_tokens.tolist() == [2, 3]
    compare(SLOTS, step, DECODE)


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
        if not has(function, VERSION):
            continue
        print(json.dumps([function.__name__, error_of(function)]), flush=True)


if __name__ == "__main__":
    sys.modules["vllm_cpu.checks"] = sys.modules["__main__"]  # functions.py imports it
    main()
