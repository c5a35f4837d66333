"""Tests of linear beyond those of every operator, which are in test_contract.py."""

import sys
import types

import pytest
import torch
from support import every_implementation, forced, named, on_device

import npu_ops
from npu_ops.core.registry import launched_by
from npu_ops.ops.linear import formats, op

IMPLEMENTATIONS = every_implementation(op.forward)
# Implementations that compute each row independently of the others.
OURS = pytest.mark.parametrize(
    "implementation, device",
    [chosen for chosen in IMPLEMENTATIONS.args[1] if chosen.values[0] != "reference"],
)


def drawn(rows, depth, columns, dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, depth), "weight": (columns, depth), "bias": (columns,)}
    return {
        n: torch.randn(shape, generator=draw, dtype=torch.float32).to(dtype)
        for n, shape in shapes.items()
    }


@OURS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
@pytest.mark.parametrize("depth, columns", [(300, 140), (33, 7)])
def test_a_row_has_the_same_bits_whatever_the_others_are(
    implementation, device, dtype, depth, columns
):
    given = on_device(drawn(200, depth, columns, dtype), device)
    x = given.pop("x")
    with torch.no_grad(), forced(implementation, "linear"):
        whole = npu_ops.linear(x, **given).cpu()
        for rows in (
            slice(0, 1),
            slice(7, 8),
            slice(130, 139),
            slice(1, 200),
            slice(None, None, 3),
        ):
            assert torch.equal(npu_ops.linear(x[rows], **given).cpu(), whole[rows]), rows
        other = x.clone()
        other[5:] = torch.nan
        assert torch.equal(npu_ops.linear(other, **given).cpu()[:5], whole[:5])


@OURS
def test_weights_of_any_strides(implementation, device):
    """A transposed weight, or a part of a larger one, gives the bits of its contiguous copy."""
    given = drawn(9, 40, 24, torch.float32)
    x, weight = (given[n].to(device) for n in ("x", "weight"))
    wider = torch.zeros(24, 64, dtype=torch.float32, device=device)
    wider[:, :40] = weight
    with torch.no_grad(), forced(implementation, "linear"):
        expected = npu_ops.linear(x, weight).cpu()
        for other in (weight.t().contiguous().t(), wider[:, :40]):
            assert torch.equal(npu_ops.linear(x, other).cpu(), expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (0, 40), (2, 0)])
def test_leading_dimensions_and_nothing_to_add(implementation, device, shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=torch.float32)
    weight, bias = (
        torch.randn(*s, generator=draw, dtype=torch.float32) for s in ((5, shape[-1]), (5,))
    )
    given = [t.to(device).requires_grad_() for t in (x, weight, bias)]
    with forced(implementation, "linear"):
        out = npu_ops.linear(*given)
        gradients = torch.autograd.grad(out.sum(), given)
    expected = torch.nn.functional.linear(*(t.requires_grad_() for t in (x, weight, bias)))
    torch.testing.assert_close(out.cpu(), expected)
    for own, theirs in zip(
        gradients, torch.autograd.grad(expected.sum(), (x, weight, bias)), strict=True
    ):
        torch.testing.assert_close(own.cpu(), theirs)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows, depth, columns", [(0, 40, 5), (3, 40, 0), (3, 0, 5)])
def test_no_kernel_is_launched_where_there_is_nothing_to_add(rows, depth, columns, with_bias):
    given = drawn(rows, depth, columns, torch.float32)
    given["bias"] = given["bias"] if with_bias else None
    with launched_by(lambda table, chosen, arguments: pytest.fail(f"{table.op} is launched")):
        out = npu_ops.linear(**given)
    expected = torch.zeros(rows, columns) + (given["bias"] if with_bias else 0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "number, why_not", [(-1, None), (2, None), (30, None), (29, "the vendor's format 29")]
)
def test_a_matrix_without_rows_is_declined(number, why_not, monkeypatch):
    """x or weight may be in a vendor format; torch_npu tells the format of a matrix on an NPU."""
    numbers = {"npu": number, "npu with rows": 2}
    double = types.SimpleNamespace(get_npu_format=lambda x: numbers[x.name])
    monkeypatch.setitem(sys.modules, "torch_npu", double)
    here = types.SimpleNamespace(device=torch.device("cpu"))
    there, rows = (
        types.SimpleNamespace(device=types.SimpleNamespace(type="npu"), name=name)
        for name in numbers
    )
    for x, weight, of in ((there, rows, "x"), (rows, there, "weight"), (here, here, None)):
        said = formats.against(types.SimpleNamespace(x=x, weight=weight))
        assert said == (f"{of} has {why_not}" if of and why_not else None)
