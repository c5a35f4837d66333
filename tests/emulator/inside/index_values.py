"""No kernel accesses memory outside a tensor for wrong index values, which an NPU does not check.

Run with --check-bounds and with tests/ops on the path.
"""

import pytest
import torch
from npu_ops_emulator import triton_driver
from support import forced
from test_index_values import INDICES, gated_delta_rule_update

import npu_ops
from npu_ops.core.registry import Table


def on_npu(inputs):
    return {n: x.npu() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


def run(index, inputs, value):
    """Run forward, and backward if there is one; return the outputs."""
    for name in ("q", "k", "v", "x", "weight", "g", "beta", "initial_state"):
        if index.trains and name in inputs:
            inputs[name].requires_grad_()
    outputs = index.function(**inputs | {index.name: value})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if index.trains:
        sum(out.float().sum() for out in outputs if out is not None).backward()
    torch.npu.synchronize()
    return outputs


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_no_kernel_leaves_a_tensor(index):
    assert triton_driver.launch.check_bounds
    right = index.call()[index.name]
    values = list(index.wrong(right).values())
    if right.dtype == torch.int64:  # int64 values that wrap as int32
        values += [right + 2**40, right - 2**40]
    with forced("triton_ascend", *Table.tables):
        for value in values:
            run(index, on_npu(index.call()), value.npu())


@pytest.mark.parametrize("starts", [[0, 2, 5], [-1, 2, 4], [1, 2, 4], [0, 5, 4], [0, -3, 4]])
def test_update_of_wrong_starts(starts):
    """The outputs of all tokens are NaN, and the states are unchanged."""
    inputs = on_npu(gated_delta_rule_update())
    before = inputs["state"].clone()
    inputs["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32).npu()
    assert npu_ops.gated_delta_rule_update(**inputs).isnan().all()
    assert torch.equal(inputs["state"], before)
