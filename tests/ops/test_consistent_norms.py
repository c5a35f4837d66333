"""NPU_OPS_CONSISTENT: frameworks' norms and activations give the same bits as npu_ops's."""

import pytest
import torch
from support import devices

import npu_ops
from npu_ops import consistent

every_device = pytest.mark.parametrize("device", [d for d in devices() if d != "cuda"])
on_npu = pytest.mark.parametrize("device", ["npu"])
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


@pytest.fixture(autouse=True)
def replaced():
    consistent.install()
    yield
    consistent.remove()


def drawn(device, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(21, 3, 96, generator=draw) for _ in range(2))
    weight = 1 + torch.randn(96, generator=draw) / 4
    return [tensor.to(device, dtype) for tensor in (x, residual, weight)]


@every_device
@MODES
def test_torchs_norm_is_ours(device, mode):
    x, _, weight = drawn(device)
    with mode():
        found = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
        assert torch.equal(found, npu_ops.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    "shape, has_weight, eps, dtype",
    [
        ((3, 96), True, 1e-5, torch.float32),
        ((96,), False, 1e-5, torch.float32),
        ((96,), True, None, torch.float32),
        ((96,), True, 1e-5, torch.float64),
    ],
)
def test_another_norm_is_pytorchs(shape, has_weight, eps, dtype):
    x, weight = drawn("cpu", dtype)[0], torch.linspace(1, 2, 96, dtype=dtype).expand(shape)
    given = x, shape, weight if has_weight else None, eps
    found = torch.nn.functional.rms_norm(*given)
    consistent.remove()
    assert torch.equal(found, torch.nn.functional.rms_norm(*given))


@every_device
def test_gradients(device):
    given = [x.requires_grad_() for x in drawn(device, torch.float32)[::2]]
    found = torch.nn.functional.rms_norm(given[0], (96,), given[1], 1e-5)
    found = torch.autograd.grad(found.square().sum(), given)
    consistent.remove()
    x, weight = (tensor.detach().cpu().double().requires_grad_() for tensor in given)
    expected = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
    expected = torch.autograd.grad(expected.square().sum(), (x, weight))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu().double(), theirs, rtol=1e-4, atol=1e-4)


if "npu" in devices():

    @on_npu
    @MODES
    def test_torch_npus_are_ours(device, mode):
        import torch_npu

        x, residual, weight = drawn(device)
        with mode():
            plain, scale = torch_npu.npu_rms_norm(x, weight, 1e-5)
            centred, _ = torch_npu.npu_gemma_rms_norm(x, weight, 1e-5)
            added, of_sum, total = torch_npu.npu_add_rms_norm(x, residual, weight, 1e-5)
            opened = torch_npu.npu_swiglu(x)
        assert torch.equal(plain, npu_ops.rms_norm(x, weight, 1e-5))
        assert torch.equal(centred, npu_ops.rms_norm(x, weight, 1e-5, zero_centered=True))
        assert torch.equal(total, x + residual)
        assert torch.equal(added, npu_ops.rms_norm(total, weight, 1e-5))
        gate, up = x.chunk(2, -1)
        assert torch.equal(opened, torch.nn.functional.silu(gate) * up)
        for found, of in ((scale, x), (of_sum, total)):
            expected = (of.cpu().double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=0)

    @on_npu
    def test_gradients_of_torch_npus(device):
        import torch_npu

        x, _, weight = drawn(device, torch.float32)
        given = x.requires_grad_(), weight.requires_grad_()
        found = torch.autograd.grad(
            torch_npu.npu_swiglu(torch_npu.npu_rms_norm(*given)[0]).sum(), given
        )
        x, weight = (tensor.detach().cpu().double().requires_grad_() for tensor in given)
        gate, up = torch.nn.functional.rms_norm(x, (96,), weight, 1e-6).chunk(2, -1)
        expected = torch.autograd.grad((torch.nn.functional.silu(gate) * up).sum(), (x, weight))
        for own, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(own.cpu().double(), theirs, rtol=1e-4, atol=1e-4)

    @on_npu
    @MODES
    def test_autocast_leaves_a_layer_norm_its_dtype(device, mode):
        """layer_norm's bf16 and fp32 kernels round a few elements differently."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(4096, 32, generator=draw).to(device, torch.bfloat16)
        weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
        expected = torch.nn.functional.layer_norm(x, (32,), weight, bias)
        with mode(), torch.autocast(device, torch.bfloat16):
            found = torch.nn.functional.layer_norm(x, (32,), weight, bias)
            mixed = torch.nn.functional.layer_norm(x, (32,), weight.float(), bias.float())
        assert found.dtype is torch.bfloat16 and torch.equal(found, expected)
        assert mixed.dtype is torch.float32

    @on_npu
    def test_gradients_of_a_layer_norm_under_autocast(device):
        given = [x.requires_grad_() for x in drawn(device)[::2]]

        def gradients(enabled):
            with torch.autocast(device, torch.bfloat16, enabled=enabled):
                out = torch.nn.functional.layer_norm(given[0], (96,), given[1])
            return torch.autograd.grad(out.float().square().sum(), given)

        for found, expected in zip(gradients(True), gradients(False), strict=True):
            assert torch.equal(found, expected)
