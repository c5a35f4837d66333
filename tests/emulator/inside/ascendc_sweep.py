"""AscendC kernels on calls drawn by hypothesis, against the fuzzer's formulas in fp64.

The fuzzer (tests/fuzz) makes and judges the calls. Here their arguments are moved to the emulated
NPU with the same memory layout, and the results are moved back.
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

EXAMPLES = 250  # per function
USUAL = {name: SIMPLEST[name] for name in ("defaults", "rewrite", "malformed")}
FORCED = {op: "ascendc" for op, table in Table.tables.items()
          if any(i.name == "ascendc" for i in table.implementations)}  # fmt: skip
FUNCTIONS = [name for name in TARGETS if registry._explained[name][0].name in FORCED]


def on_npu(function, counts):
    """Return `function` run by its AscendC kernels, or on the CPU for calls that they decline."""

    @functools.wraps(function)
    def call(**arguments):
        with torch.no_grad():
            # raises for wrong index values, which a device does not check
            function(**placed(arguments, "cpu"))
        if any(getattr(value, "dtype", None) == torch.float64 for value in arguments.values()):
            counts["refused"] += 1  # an NPU has no fp64
            return function(**arguments)
        there = placed(arguments, "npu")
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


def placed(arguments: dict, device: str) -> dict:
    """Return copies of the arguments on a device, with the same layout and sharing of memory.

    A tensor with a gradient is copied alone and dense.
    """
    bases = {}

    def one(value):
        if isinstance(value, tuple):
            return tuple(map(one, value))
        if not isinstance(value, torch.Tensor):
            return value
        if value.requires_grad and device != "cpu":
            return value.to(device)
        storage = value.untyped_storage()
        key = storage.data_ptr(), value.dtype
        if key not in bases:
            count = storage.nbytes() // value.element_size()
            whole = value.detach().as_strided((count,), (1,), 0)
            bases[key] = whole.clone() if device == "cpu" else whole.to(device)
        return bases[key].as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: one(value) for name, value in arguments.items()}


def give_back(value, there):
    """Copy tensors that changed on the device back to `value`. Expanded memory is only read."""
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
