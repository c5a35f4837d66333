"""AscendC kernels on calls that hypothesis draws, against the fuzzer's formulas in fp64.

The fuzzer (tests/fuzz) makes and judges the calls; here they are moved to the emulated NPU, as they
lie in memory, and their results back.
"""

import functools
import json

import pytest
import torch
import torch_npu  # noqa: F401
from fuzz.judge import judge
from fuzz.run import SIMPLEST, cases, repeating
from fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings

import npu_ops
from npu_ops.core import env, registry
from npu_ops.core.registry import Table

EXAMPLES = 250  # of each function
USUAL = {name: SIMPLEST[name] for name in ("defaults", "rewrite", "malformed")}
FORCED = {op: "ascendc" for op, table in Table.tables.items()
          if any(i.name == "ascendc" for i in table.implementations)}  # fmt: skip
FUNCTIONS = [name for name in TARGETS if registry._explained[name][0].name in FORCED]


def on_npu(function, counts):
    """`function` by its AscendC kernels; on the CPU where they do not take a call."""

    @functools.wraps(function)
    def call(**arguments):
        with torch.no_grad():
            function(**copied(arguments))  # raises for index values, which no device looks at
        there = {name: moved(value) for name, value in arguments.items()}
        try:
            with env.override(impl=FORCED):
                outputs = function(**there)
        except RuntimeError as error:
            if "NPU_OPS_IMPL forces" not in str(error):
                raise
            counts["refused"] += 1
            return function(**arguments)
        counts["ran"] += 1
        for name, value in arguments.items():
            give_back(value, there[name])
        if isinstance(outputs, tuple):
            return tuple(None if out is None else out.cpu() for out in outputs)
        return outputs.cpu()

    return call


def copied(value):
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def moved(value):
    """An argument on the NPU, laid out as it is here unless it has a gradient."""
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if not isinstance(value, torch.Tensor):
        return value
    if value.requires_grad:
        return value.npu()
    size = value.untyped_storage().nbytes() // value.element_size()
    there = value.as_strided((size,), (1,), 0).npu()
    return there.as_strided(value.shape, value.stride(), value.storage_offset())


def give_back(value, there):
    """Write what was written there; what was not is the same, and expanded memory is only read."""
    if isinstance(value, tuple):
        for parts in zip(value, there, strict=True):
            give_back(*parts)
    elif isinstance(value, torch.Tensor) and not value.requires_grad:
        result = there.cpu()
        if not torch.equal(torch.nan_to_num(result), torch.nan_to_num(value)):
            value.copy_(result)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_random_calls(name, monkeypatch):
    counts = dict.fromkeys(("ran", "refused"), 0)
    monkeypatch.setattr(npu_ops, name, on_npu(getattr(npu_ops, name), counts))

    @settings(max_examples=EXAMPLES, database=None, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(name, ("eager",)).map(lambda case: case | json.loads(json.dumps(USUAL))))
    def sweep(case):
        verdict = judge(case)
        assert verdict is None, f"{verdict}\n{repeating(case)}"

    sweep()
    print(f"{name}: {counts['ran']} calls by AscendC kernels, {counts['refused']} refused")
    assert counts["ran"] > EXAMPLES / 5
