"""Tests of grouped_linear beyond those of every operator, which are in test_contract.py."""

import pytest
import torch
from support import every_implementation, forced, named, on_device

import npu_ops
from npu_ops.core import env
from npu_ops.ops.grouped_linear import op
from npu_ops.ops.grouped_linear.cases import CASES
from npu_ops.ops.linear import formats

IMPLEMENTATIONS = every_implementation(op.forward)
# Implementations that sum in the order of `linear`.
OURS = pytest.mark.parametrize(
    "implementation, device",
    [c for c in IMPLEMENTATIONS.args[1] if c.values[0] not in ("reference", "aclnn")],
)


def drawn(name: str, dtype=torch.float32) -> dict:
    return next(case for case in CASES if case.name == name).inputs(dtype)


@OURS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
@pytest.mark.parametrize("name", ["three-groups-t150", "odd-t65"])
def test_a_row_has_the_bits_that_linear_gives_it(implementation, device, dtype, name):
    given = on_device(drawn(name, dtype), device)
    x, weight, offs = (given[n] for n in ("x", "weight", "offs"))
    with torch.no_grad(), forced(implementation, "grouped_linear"):
        out = npu_ops.grouped_linear(x, weight, offs).cpu()
    begin = 0
    with forced(implementation, "linear"):
        for matrix, end in zip(weight, offs.tolist(), strict=True):
            assert torch.equal(out[begin:end], npu_ops.linear(x[begin:end], matrix).cpu())
            begin = end
    assert begin < len(out) and not out[begin:].any()


@IMPLEMENTATIONS
def test_what_is_in_no_group_changes_nothing(implementation, device):
    """Rows past the last group: their outputs and gradients are 0, and no other
    gradient uses them."""
    given = drawn("three-groups-t150")
    last = int(given["offs"][-1])
    given["x"][last:] = torch.nan
    x, weight, offs = (given[n].to(device) for n in ("x", "weight", "offs"))
    leaves = x.requires_grad_(), weight.requires_grad_()
    with forced(implementation, "grouped_linear"):
        out = npu_ops.grouped_linear(*leaves, offs)
        grads = torch.autograd.grad(out, leaves, torch.full_like(out, 2.0))
    assert not out[last:].any() and not grads[0][last:].any()
    assert all(bool(t.isfinite().all()) for t in (out, *grads))
    assert not grads[1][0].any()  # the first group is empty


@IMPLEMENTATIONS
@pytest.mark.parametrize("wrong", [[0, 13, 151], [14, 13, 145], [-1, 13, 145]])
def test_wrong_offs_on_a_device_give_nan(implementation, device, wrong):
    if device == "cpu":
        with pytest.raises(ValueError, match="offs: got"):
            npu_ops.grouped_linear(**drawn("three-groups-t150") | {"offs": torch.tensor(wrong)})
        return
    x, weight = (drawn("three-groups-t150")[n].to(device).requires_grad_() for n in ("x", "weight"))
    with forced(implementation, "grouped_linear"):
        out = npu_ops.grouped_linear(x, weight, torch.tensor(wrong, device=device))
        grads = torch.autograd.grad(out.sum(), (x, weight))
    assert all(bool(t.isnan().all()) for t in (out, *grads))


def test_the_vendors_product_is_left_out_where_bits_are_promised(monkeypatch):
    given = drawn("odd-t2")
    arguments = op.forward.Arguments(*given.values(), out=None)
    with env.override(consistent="tokens"):
        said = op.aclnn.why_not(arguments)
    assert said == "its bits may depend on the number of rows"


def test_a_format_of_the_vendors_is_no_matter_for_the_reference(monkeypatch):
    """The reference refuses a private format: a silent fallback would change a call's bits."""
    monkeypatch.setattr(formats, "format_why_not", lambda x: "the vendor's format 29")
    x, weight, offs = torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor([1, 3])
    with forced("reference", "grouped_linear"), pytest.raises(ValueError, match="x: got the vend"):
        npu_ops.grouped_linear(x, weight, offs)
