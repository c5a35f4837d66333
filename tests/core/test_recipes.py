"""Known calls in C++: what computes them, what is told apart, and what autograd sees of them."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from test_alike import AROUND, OTHERS
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import npu_ops
from npu_ops.core import env, library, plans
from npu_ops.core.operator import Operator
from npu_ops.core.recipes import Calls

P = {"p": 0.0, "training": True}


@pytest.fixture(autouse=True)
def begin():
    plans.forget()


@pytest.fixture
def in_python(monkeypatch):
    """What Python computes by a plan, and what it searches for."""
    found = []
    for name in ("_run_again", "_first_run"):
        method = getattr(Operator, name)

        def noted(self, *args, method=method):
            found.append(self.name)
            return method(self, *args)

        monkeypatch.setattr(Operator, name, noted)
    return found


def normed(x, weight, z):
    return npu_ops.rms_norm_gated(x, weight, z)


def tensors(shape=(3, 8), wanted=True):
    x, z = torch.randn(shape), torch.randn(shape)
    return [t.requires_grad_(wanted) for t in (x, torch.randn(shape[-1]), z)]


def known(function=normed, make=tensors, times=5):
    """Call it until C++ does, forward and backward."""
    for _ in range(times):
        given = make()
        out = function(*given)
        if out.requires_grad:
            torch.autograd.grad(out, given, torch.ones_like(out))


def gradients(function, given, grad):
    return torch.autograd.grad(function(*given), given, grad)


def by_python(function, *args):
    """The same by a call that is looked at anew."""
    plans.forget()
    return function(*args)


def assert_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


def test_this_installation_has_it():
    assert npu_ops.build_info()["known_why_not"] is None


@pytest.mark.parametrize("wanted", [False, True])
def test_python_has_no_part_in_a_known_call(in_python, wanted):
    known(make=lambda: tensors(wanted=wanted))
    del in_python[:]
    given, grad = tensors(wanted=wanted), torch.randn(3, 8)
    out = normed(*given)
    found = torch.autograd.grad(out, given, grad) if wanted else []
    assert in_python == []
    assert out.requires_grad == wanted
    assert_equal([out], [by_python(normed, *given)])
    assert_equal(found, by_python(gradients, normed, given, grad) if wanted else [])


def test_several_shapes_are_known_at_once(in_python):
    shapes = [(n, 8) for n in range(1, 6)]
    for _ in range(5):
        for shape in shapes:
            known(make=lambda shape=shape: tensors(shape), times=1)
    del in_python[:]
    for shape in shapes:
        known(make=lambda shape=shape: tensors(shape), times=1)
    assert in_python == []


def test_more_shapes_than_are_kept():
    for _ in range(5):
        for n in range(1, 41):
            given = tensors((n, 8))
            assert normed(*given).shape == (n, 8)


class Counted:
    """A function of `Calls`: what it found."""

    def __init__(self):
        self.calls = Calls()
        self.x, self.weight = torch.randn(2, 3, 8), torch.ones(8)
        operator = npu_ops.ops.l2norm.op.forward
        for _ in range(3):
            operator(self.x, 1e-6, torch.float32)
        self.again = operator._planned((self.x, 1e-6, torch.float32))[1].known[None]

    def keep(self, settings=("a",)):
        self.calls.keep((self.x,), settings, self.again)

    def find(self, *given, settings=("a",)):
        return self.calls.again(given, settings)


@pytest.fixture
def counted():
    made = Counted()
    made.keep()
    assert made.find(made.x) is not None
    return made


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_another_call(counted, name):
    assert counted.find(OTHERS[name](counted.x)) is None


def test_more_or_fewer_tensors_are_another_call(counted):
    assert counted.find() is counted.find(counted.x, None) is None


@pytest.mark.parametrize("settings", [("b",), (), ("a", None), (["a"],), (torch.ones(2),)])
def test_other_settings_are_another_call(counted, settings):
    assert counted.find(counted.x, settings=settings) is None


@pytest.mark.parametrize("name", sorted(set(AROUND) - {"tangents"}))
def test_the_same_elsewhere_is_another_call(counted, name):
    with AROUND[name]():
        assert counted.find(counted.x) is None


def test_a_tensor_with_a_tangent_is_another_call(counted):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(counted.x, counted.x)
        assert counted.find(dual) is None


def test_transforms_and_tracers_see_the_operator(counted):
    found = []

    def noted(x):
        found.append(counted.find(x))
        return x.sum()

    torch.func.grad(noted)(counted.x)
    torch.func.vmap(noted)(torch.stack([counted.x, counted.x]))
    torch.func.functionalize(noted)(counted.x)
    torch.fx.experimental.proxy_tensor.make_fx(noted)(counted.x)
    torch.compile(noted, backend="eager")(counted.x)
    torch.jit.trace(noted, counted.x, check_trace=False)
    assert found == [None] * 6


def test_what_computes_may_change_between_forward_and_backward(in_python):
    known()
    given = tensors()
    out = normed(*given)
    del in_python[:]
    with env.override(impl={"rms_norm_gated": "reference"}):
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert in_python == ["rms_norm_gated_backward"]


def test_known_calls_are_logged(caplog):
    known()
    with env.override(log="calls"), caplog.at_level(logging.INFO):
        for _ in range(3):
            known()
        assert sum("rms_norm_gated(" in message for message in caplog.messages) == 15


# What autograd sees


def test_gradients_that_are_wanted():
    known()
    for wanted in ((0,), (1, 2), (0, 2)):
        given = tensors()
        some = [given[i] for i in wanted]
        for _ in range(4):
            out = normed(*given)
            found = torch.autograd.grad(out, some, torch.ones_like(out))
        expected = by_python(gradients, normed, given, torch.ones_like(out))
        assert_equal(found, [expected[i] for i in wanted])


def test_layouts_of_gradients():
    known()
    given = tensors()
    for grad in (torch.ones(8, 3).t(), torch.ones(1, 1).expand(3, 8), torch.randn(3, 8)):
        for _ in range(4):
            found = gradients(normed, given, grad)
        assert_equal(found, by_python(gradients, normed, given, grad))


def test_a_gradient_accumulates_and_hooks_are_called():
    known()
    x, weight, z = tensors()
    seen, before = [], torch.randn(3, 8)
    x.grad = before.clone()
    out = normed(x, weight, z)
    out.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    out.grad_fn.register_hook(lambda *_: seen.append("node"))
    assert out.grad_fn.name() == "npu_ops::rms_norm_gated"
    out.sum().backward()
    expected, *_ = by_python(gradients, normed, (x, weight, z), torch.full((3, 8), 2.0))
    assert torch.equal(x.grad, before + expected) and seen[1:] == ["node"]


def test_backward_twice():
    known()
    given, grad = tensors(), torch.randn(3, 8)
    out = normed(*given)
    first = torch.autograd.grad(out, given, grad, retain_graph=True)
    assert_equal(torch.autograd.grad(out, given, grad), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, given, grad)


def test_what_was_saved_may_not_change():
    known()
    x, weight, z = tensors()
    out = normed(x, weight, z)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def added(x, bias, residual):
    return npu_ops.bias_dropout_add(x, bias, residual, **P)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gradients_of_gradients(p):
    """Those of bias_dropout_add have one; of the others the error is theirs."""

    def function(x, bias, residual):
        return npu_ops.bias_dropout_add(x, bias, residual, p, True)

    known(function)
    x, bias, residual = tensors()
    grad = torch.randn(3, 8, requires_grad=True)
    out = function(x, bias, residual)
    found = torch.autograd.grad(out, (x, bias, residual), grad, create_graph=True)
    (second,) = torch.autograd.grad(found[1].sum() + 2 * found[0].sum(), grad)
    kept = (found[0] / grad).detach()  # what the mask and its scale are
    assert torch.allclose(second, 3 * kept)
    known()
    given = tensors()
    (first, *_) = torch.autograd.grad(normed(*given), given, grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of its gradient"):
        first.sum().backward()


def test_an_output_that_nobody_used():
    def gates(a, A_log, dt_bias, b):
        return npu_ops.gdn_gate(a, A_log, dt_bias, b)

    def make():
        return [torch.randn(s, requires_grad=True) for s in ((5, 4), (4,), (4,), (5, 4))]

    given, ones = make(), torch.ones(5, 4)
    for used in (0, 1):
        found = [
            torch.autograd.grad(gates(*given)[used], given, ones, allow_unused=True)
            for _ in range(6)
        ]
        plans.forget()
        expected = torch.autograd.grad(gates(*given)[used], given, ones, allow_unused=True)
        for one in found:
            for x, y in zip(one, expected, strict=True):
                assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    given, grad = tensors(), torch.randn(3, 8)
    expected = gradients(normed, given, grad)
    for _ in range(6):
        for x in given:
            x.grad = None
        checkpoint(normed, *given, use_reentrant=reentrant).backward(grad)
        assert_equal([x.grad for x in given], expected)


def test_what_is_saved_goes_through_hooks():
    """Also what comes back in another layout."""
    known()
    given, grad = tensors(), torch.randn(3, 8)
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.detach().clone()

    def unpack(x):
        return x.t().contiguous().t() if x.dim() == 2 else x

    with saved_tensors_hooks(pack, unpack):
        out = normed(*given)
    found = torch.autograd.grad(out, given, grad)
    assert packed
    for x, y in zip(found, by_python(gradients, normed, given, grad), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_batched_gradients():
    known()
    given, grads = tensors(), torch.randn(2, 3, 8)
    out = normed(*given)
    found = torch.autograd.grad(out, given, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, given, grad, retain_graph=True) for grad in grads]
    for i, batch in enumerate(found):
        assert torch.allclose(batch, torch.stack([one[i] for one in each]), atol=1e-5)


def test_compiled_autograd():
    known()
    given, grad = tensors(), torch.randn(3, 8)
    expected = gradients(normed, given, grad)
    out = normed(*given)
    assert out.grad_fn.name() == "npu_ops::rms_norm_gated"
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        out.backward(grad)
    for x, y in zip(given, expected, strict=True):
        assert torch.allclose(x.grad, y, atol=1e-6)


def test_anomalies_are_found():
    with torch.autograd.set_detect_anomaly(True):
        known()
        given = tensors()
        out = normed(*given)
        with pytest.raises(RuntimeError, match="rms_norm_gated.*returned nan"):
            out.backward(torch.full((3, 8), float("nan")))


def test_threads_call_and_differentiate():
    known()
    given, grad = tensors((64, 8)), torch.randn(64, 8)
    expected = gradients(normed, given, grad)
    found, errors = [], []

    def work(rows):
        try:
            for n in range(1, rows):
                gradients(normed, tensors((n % 20 + 1, 8)), torch.ones(n % 20 + 1, 8))
                found.append(gradients(normed, given, grad))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(60 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(found) == 59 + 60 + 61 + 62
    for one in found:
        assert_equal(one, expected)


def test_nothing_is_kept_alive():
    """Neither tensors, nor what was known once it is forgotten."""
    known()
    given = tensors()
    out = normed(*given)
    operator = npu_ops.ops.rms_norm_gated.op.forward
    seen = [weakref.ref(plan) for plan in operator._plans._plans.values() if plan]
    seen += [weakref.ref(x) for x in (*given, out)]
    del given, out
    for function in (operator, npu_ops.ops.rms_norm_gated._call):
        function._calls = Calls()
    operator._plans._plans.clear()
    npu_ops.ops.rms_norm_gated._call._known.clear()
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


# Without it


def test_without_it_python_computes(in_python, monkeypatch):
    monkeypatch.setattr(library, "known", lambda: None)
    known()
    del in_python[:]
    given, grad = tensors(), torch.randn(3, 8)
    found = gradients(normed, given, grad)
    assert in_python == ["rms_norm_gated", "rms_norm_gated_backward"]
    assert_equal(found, by_python(gradients, normed, given, grad))


def test_why_it_is_not_there(monkeypatch):
    built_with = npu_ops.build_info()["torch"]
    assert library._load_known(built_with) is None
    assert library._load_known("2.9.0") == (
        f"they are built for one torch: here {torch.__version__}, then 2.9.0"
    )
    monkeypatch.setattr(library, "KNOWN", "npu_ops._nothing")
    assert "NPU_OPS_SKIP_KNOWN=1" in library._load_known(built_with)
