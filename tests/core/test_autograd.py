"""Our operators' gradients have the features of torch's own, such as hooks and double backward."""

import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import npu_ops
from npu_ops.core import env
from npu_ops.core.registry import launched_by


def normed(x, weight, z):
    return npu_ops.rms_norm_gated(x, weight, z)


def tensors(shape=(3, 8)):
    sizes = shape, shape[-1:], shape
    return [torch.randn(size, requires_grad=True) for size in sizes]


def gradients(function, given, grad):
    return torch.autograd.grad(function(*given), given, grad)


def assert_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


def test_another_implementation_may_compute_the_backward():
    given, seen = tensors(), []
    out = normed(*given)

    def launch(table, chosen, args):
        seen.append((table.op, chosen.name))
        chosen.launcher(*args)

    with launched_by(launch), env.override(impl={"rms_norm_gated": "reference"}):
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert seen == [("rms_norm_gated_backward", "reference")]


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (0, 2)])
def test_gradients_of_some_inputs(wanted):
    given = tensors()
    out = normed(*given)
    found = torch.autograd.grad(out, [given[i] for i in wanted], torch.ones_like(out))
    expected = gradients(normed, given, torch.ones_like(out))
    assert_equal(found, [expected[i] for i in wanted])


def test_hooks_of_tensors_and_nodes_are_called():
    x, weight, z = tensors()
    seen, before = [], torch.randn(3, 8)
    x.grad = before.clone()
    out = normed(x, weight, z)
    out.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    out.grad_fn.register_hook(lambda *_: seen.append("node"))
    assert out.grad_fn.name() == "rms_norm_gatedBackward"
    out.sum().backward()
    expected, *_ = gradients(normed, (x, weight, z), torch.full((3, 8), 2.0))
    assert torch.equal(x.grad, before + expected) and seen[1:] == ["node"]


def test_backward_twice():
    given, grad = tensors(), torch.randn(3, 8)
    out = normed(*given)
    first = torch.autograd.grad(out, given, grad, retain_graph=True)
    assert_equal(torch.autograd.grad(out, given, grad), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, given, grad)


def test_a_saved_tensor_may_not_change():
    x, weight, z = tensors()
    out = normed(x, weight, z)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_bias_dropout_add_has_a_second_gradient(p):
    x, bias, residual = tensors()
    grad = torch.randn(3, 8, requires_grad=True)
    out = npu_ops.bias_dropout_add(x, bias, residual, p, True)
    found = torch.autograd.grad(out, (x, bias, residual), grad, create_graph=True)
    (second,) = torch.autograd.grad(found[1].sum() + 2 * found[0].sum(), grad)
    kept = (found[0] / grad).detach()  # mask times scale
    assert torch.allclose(second, 3 * kept)


def test_other_ops_refuse_a_second_gradient():
    given, grad = tensors(), torch.randn(3, 8, requires_grad=True)
    first, *_ = torch.autograd.grad(normed(*given), given, grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of its gradient"):
        first.sum().backward()


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_used(used):
    given = [torch.randn(size, requires_grad=True) for size in ((5, 4), (4,), (4,), (5, 4))]
    ones = torch.ones(5, 4)
    found = torch.autograd.grad(npu_ops.gdn_gate(*given)[used], given, ones, allow_unused=True)
    both = [ones if i == used else torch.zeros(5, 4) for i in range(2)]
    expected = torch.autograd.grad(npu_ops.gdn_gate(*given), given, both)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(y, torch.zeros_like(y) if x is None else x)


def test_saved_tensors_go_through_hooks():
    """Hooks may return saved tensors with other strides."""
    given, grad, packed = tensors(), torch.randn(3, 8), []

    def pack(x):
        packed.append(x.shape)
        return x.detach().clone()

    def unpack(x):
        return x.t().contiguous().t() if x.dim() == 2 else x

    with saved_tensors_hooks(pack, unpack):
        out = normed(*given)
    found = torch.autograd.grad(out, given, grad)
    assert packed
    for x, y in zip(found, gradients(normed, given, grad), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_batched_gradients():
    given, grads = tensors(), torch.randn(2, 3, 8)
    out = normed(*given)
    found = torch.autograd.grad(out, given, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, given, grad, retain_graph=True) for grad in grads]
    for i, batch in enumerate(found):
        assert torch.allclose(batch, torch.stack([one[i] for one in each]), atol=1e-5)


def test_compiled_autograd():
    given, grad = tensors(), torch.randn(3, 8)
    expected = gradients(normed, given, grad)
    out = normed(*given)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        out.backward(grad)
    for x, y in zip(given, expected, strict=True):
        assert torch.allclose(x.grad, y, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Error detected in rms_norm_gated")
def test_anomaly_detection_names_the_operator():
    given = tensors()
    with torch.autograd.set_detect_anomaly(True):
        out = normed(*given)
        with pytest.raises(RuntimeError, match="rms_norm_gated.*returned nan"):
            out.backward(torch.full((3, 8), float("nan")))


def test_threads_call_and_differentiate():
    given, grad = tensors((64, 8)), torch.randn(64, 8)
    expected = gradients(normed, given, grad)
    found, errors = [], []

    def work(calls):
        try:
            for n in range(calls):
                gradients(normed, tensors((n % 20 + 1, 8)), torch.ones(n % 20 + 1, 8))
                found.append(gradients(normed, given, grad))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(60 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(found) == 60 + 61 + 62 + 63
    for one in found:
        assert_equal(one, expected)
