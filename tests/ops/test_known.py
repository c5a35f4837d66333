"""A call like others before is not checked anew, and nothing else changes."""

import functools

import pytest
import torch
from support import devices, evaluate

import npu_ops
from npu_ops.core import library, plans
from npu_ops.ops import attention, bias_dropout_add, gdn_gate, l2norm, rms_norm_gated

FUNCTIONS = {
    "attention": (attention, ("q", "k", "v"), [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]),
    "bias_dropout_add": (
        bias_dropout_add._without_dropout,
        ("x", "bias", "residual"),
        [(2, 5, 8), (8,), (2, 5, 8)],
    ),
    "gdn_gate": (
        gdn_gate._call,
        ("a", "A_log", "dt_bias", "b"),
        [(2, 5, 4), (4,), (4,), (2, 5, 4)],
    ),
    "l2norm": (l2norm._call, ("x",), [(2, 5, 8)]),
    "rms_norm_gated": (rms_norm_gated._call, ("x", "weight", "z"), [(2, 5, 8), (8,), (2, 5, 8)]),
}


@pytest.fixture(autouse=True, params=[True, False], ids=["C++", "Python"])
def begin(request, monkeypatch):
    """As with what makes known calls in C++, and without."""
    if not request.param:
        monkeypatch.setattr(library, "known", lambda: None)
    plans.forget()


@pytest.fixture(params=FUNCTIONS)
def function(request):
    """A public function, what makes its arguments, and what it has prepared."""
    (call, names, shapes), prepared = FUNCTIONS[request.param], []
    prepare = call._prepare

    def noted(*args, **kwargs):
        prepared.append(args)
        return prepare(*args, **kwargs)

    def make(device="cpu", dtype=torch.float32):
        made = zip(names, shapes, strict=True)
        return {name: torch.randn(shape).to(device, dtype) for name, shape in made}

    call._prepare = noted
    without = {"p": 0.0, "training": True} if request.param == "bias_dropout_add" else {}
    yield functools.partial(getattr(npu_ops, request.param), **without), make, prepared
    call._prepare = prepare


def called(function, arguments):
    """Without a gradient, its results as a list."""
    found = function(**arguments)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("device", devices())
def test_a_known_call_is_not_checked_and_is_the_same(function, device):
    function, make, prepared = function
    for _ in range(4):
        called(function, make(device))
    del prepared[:]
    arguments = make(device)
    found = called(function, arguments)
    assert prepared == []
    plans.forget()
    for actual, expected in zip(found, called(function, arguments), strict=True):
        assert torch.equal(actual, expected) and actual.stride() == expected.stride()
    assert len(prepared) == 1


def test_gradients_are_recorded(function):
    function, make, _ = function
    for _ in range(4):
        called(function, make())
        kept = evaluate(function, arguments := make(), list(arguments))
    plans.forget()
    expected = evaluate(function, arguments, list(arguments))
    assert kept.keys() == expected.keys()
    for name, value in kept.items():
        assert torch.equal(value, expected[name]), name


def test_other_calls_are_checked(function):
    """Of other dtypes, of lists, of tensors without strides."""
    function, make, prepared = function
    for _ in range(4):
        called(function, make())
    first = next(iter(make()))
    for wrong in (torch.ones(2, 5, 4, dtype=torch.int64), [1.0], torch.eye(4).to_sparse(),
                  torch.nested.nested_tensor([torch.ones(4)])):  # fmt: skip
        del prepared[:]
        with pytest.raises(TypeError, match=f"^{first}: got "):
            function(**make() | {first: wrong})
        assert len(prepared) == 1


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBND"])
def test_attention_in_each_layout(layout):
    """Known by then, without a gradient and with one."""
    for training in (False, True):
        plans.forget()
        q, k, v = (torch.randn(3, 4, 2, 8).requires_grad_(training) for _ in range(3))
        call = functools.partial(npu_ops.attention, q, k, v, layout=layout, return_lse=True)
        first, *others = [call() for _ in range(4)]
        for out, lse in others:
            assert torch.equal(out, first[0]) and out.stride() == first[0].stride()
            assert torch.equal(lse, first[1]) and out.requires_grad == training


def test_what_autocast_converts_is_checked_without_it():
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            npu_ops.attention(q, k, k)
        with pytest.raises(TypeError, match="^k: got "):
            npu_ops.attention(q, k, k)


def test_settings_are_checked():
    x = torch.randn(3, 8)
    for _ in range(4):
        npu_ops.rms_norm_gated(x, torch.ones(8), -x)
        npu_ops.l2norm(x)
        npu_ops.attention(x[None, None], x[None, None], x[None, None])
    for wrong in ("left", ["BSND"]):
        with pytest.raises(ValueError, match="^layout: got "):
            npu_ops.attention(x[None, None], x[None, None], x[None, None], layout=wrong)
    for wrong in ("tanh", ["silu"]):
        with pytest.raises(ValueError, match="^activation: got "):
            npu_ops.rms_norm_gated(x, torch.ones(8), -x, activation=wrong)
    with pytest.raises(ValueError, match="^eps: got -1"):
        npu_ops.l2norm(x, -1)
