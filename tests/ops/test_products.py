"""NPU_OPS_CONSISTENT: every matrix product of a model has the bits of npu_ops.linear."""

import os
import subprocess
import sys

import pytest
import torch
from support import devices, forced, named
from torch._subclasses.fake_tensor import is_fake

import npu_ops
from npu_ops import consistent
from npu_ops.ops.linear import formats

every_device = pytest.mark.parametrize("device", [d for d in devices() if d != "cuda"])
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
WAYS = {
    "linear": lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias),
    "no bias": lambda x, weight, bias: torch.nn.functional.linear(x, weight),
    "matmul": lambda x, weight, bias: torch.matmul(x, weight.t()),
    "operator": lambda x, weight, bias: x @ weight.t() + bias,
    "batches": lambda x, weight, bias: (x[None] @ weight.t())[0],
}


@pytest.fixture
def replaced():
    consistent.install()
    yield
    consistent.remove()


def drawn(device="cpu", dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = (70, 300), (50, 300), (50,)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float32).to(device, dtype)
        for shape in shapes
    ]


@every_device
@MODES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_a_row_has_the_same_bits(replaced, device, mode, way, dtype):
    x, weight, bias = drawn(device, dtype)
    with mode():
        whole = WAYS[way](x, weight, bias)
        for rows in (slice(0, 1), slice(33, 40)):
            assert torch.equal(WAYS[way](x[rows], weight, bias), whole[rows])
        assert torch.equal(npu_ops.linear(x, weight), WAYS["matmul"](x, weight, bias))


@every_device
def test_patches_of_pictures_are_embedded_by_a_product(replaced, device):
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 3, 2, 4, 4, generator=draw).to(device) for n in (70, 24))
    bias = torch.randn(24, generator=draw).to(device)
    found = torch.nn.functional.conv3d(x, weight, bias, stride=(2, 4, 4))
    expected = npu_ops.linear(x.flatten(1), weight.flatten(1), bias)
    assert found.shape == (70, 24, 1, 1, 1) and torch.equal(found.flatten(1), expected)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 3, 4, 8, 8), {"stride": (2, 4, 4)}),
        ((2, 3, 2, 4, 4), {"padding": 1}),
        ((3, 2, 4, 4), {}),
        ((2, 6, 2, 4, 4), {"groups": 2}),
    ],
)
def test_another_convolution_is_pytorchs(replaced, shape, options):
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=draw) for s in (shape, (24, 3, 2, 4, 4)))
    found = torch.nn.functional.conv3d(x, weight, **options)
    consistent.remove()
    assert torch.equal(found, torch.nn.functional.conv3d(x, weight, **options))


@every_device
def test_gradients_are_pytorchs(replaced, device):
    given = [x.requires_grad_() for x in drawn(device)]
    found = torch.autograd.grad(WAYS["linear"](*given).square().sum(), given)
    x, weight, bias = (x.detach().cpu().double().requires_grad_() for x in given)
    expected = torch.autograd.grad((x.mm(weight.t()) + bias).square().sum(), (x, weight, bias))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu().double(), theirs, rtol=1e-4, atol=1e-2)


def test_compiled(request):
    request.addfinalizer(consistent.remove)
    x = drawn()[0]
    layer = torch.nn.Linear(300, 50)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    before = compiled(x)
    consistent.install()  # torch has already traced the operators
    torch._dynamo.reset()
    found = compiled(x)
    assert torch.equal(found, layer(x)) and not torch.equal(found, before)
    consistent.remove()
    torch._dynamo.reset()
    assert torch.equal(compiled(x), before)


def test_autocast(replaced):
    x = drawn()[0]
    layer = torch.nn.Linear(300, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[:3], layer(x[:3])) and layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.double() @ x.double().t(),
        lambda x: (x * 9).long() @ x.long().t(),
        lambda x: x.view(7, 10, 300) @ x.view(7, 10, 300).transpose(1, 2),
        lambda x: x[0] @ x[1],
        lambda x: x @ x[0],
        lambda x: torch.nn.functional.linear(x.double(), x[:9].double(), x[:9, 0].double()),
        lambda x: x @ x.to_sparse().t(),
    ],
)
def test_other_products_stay_pytorchs(call):
    x = drawn()[0]
    expected = call(x)
    consistent.install()
    found = call(x)
    consistent.remove()
    assert torch.equal(found, expected)


def test_wrong_shapes_are_refused_as_pytorch_does(replaced):
    x, weight, _ = drawn()
    for call in (lambda: x @ weight, lambda: torch.nn.functional.linear(x, weight[:, :9])):
        with pytest.raises((RuntimeError, ValueError), match="shape|weight"):
            call()


def test_a_format_of_the_vendors_is_an_error(replaced, monkeypatch):
    monkeypatch.setattr(formats, "format_why_not", lambda x: "the vendor's format 29")
    x, weight, bias = drawn()
    with pytest.raises(
        ValueError, match="weight: got the vendor's format 29, needs format ND .*NZ=0"
    ):
        torch.nn.functional.linear(x, weight, bias)


def test_a_graph_meets_a_format_of_the_vendors_when_it_runs(monkeypatch):
    """A fake tensor has no format, so tracing cannot check it."""
    monkeypatch.setattr(formats, "format_why_not", lambda x: None if is_fake(x) else "format 29")
    x, weight, bias = drawn()
    with forced("reference", "linear"):
        compiled = torch.compile(npu_ops.linear, backend="aot_eager", fullgraph=True)
        with pytest.raises(ValueError, match="x: got format 29, needs format ND"):
            compiled(x, weight, bias)


def test_the_setting_replaces_them_and_nothing_else_does():
    assert not consistent.installed()
    code = "import npu_ops.consistent as p; print(p.installed())"
    for mode, expected in (("0", "False"), ("1", "True"), ("chunks", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"NPU_OPS_CONSISTENT": mode},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected, done.stderr
