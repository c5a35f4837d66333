"""Which calls are like the latest one, and that whatever may differ is told apart."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from npu_ops.core import alike, plans

SETTINGS = (0.5, None, "BSND")


def tensors():
    return torch.ones(2, 3, 8), None, torch.ones(8)


@pytest.fixture
def latest():
    """Has met a call twice."""
    made = alike.Latest()
    for _ in range(2):
        made.keep(tensors(), SETTINGS, "kept")
    return made


def test_another_call_like_it_is_found(latest):
    x, _, weight = tensors()
    assert latest.find((x * 2, None, weight), SETTINGS) == "kept"


OTHERS = {
    "shape": lambda x: x[:1],
    "stride": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "dtype": torch.Tensor.double,
    "device": lambda x: x.to("meta"),
    "gradient": lambda x: x.requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "none": lambda x: None,
    "list": torch.Tensor.tolist,
    "number": lambda x: 1.0,
    "sparse": torch.Tensor.to_sparse,
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "negative": torch._neg_view,
    "subclass": lambda x: x.as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_another_call(latest, name):
    x, _, weight = tensors()
    assert latest.find((OTHERS[name](x), None, weight), SETTINGS) is None


def test_a_tensor_for_none_and_none_for_a_tensor_are_another_call(latest):
    x, _, weight = tensors()
    assert latest.find((x, x, weight), SETTINGS) is None
    assert latest.find((x.detach(), None, None), SETTINGS) is None


@pytest.mark.parametrize("settings", [(0.25, None, "BSND"), (0.5, None), (0.5, [], "BSND")])
def test_other_settings_are_another_call(latest, settings):
    assert latest.find(tensors(), settings) is None


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


AROUND = {
    "group": group,
    "mode": Mode,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "tangents": forward_ad.dual_level,
    "chosen anew": lambda: contextlib.nullcontext(plans.forget()),
}


@pytest.mark.parametrize("name", AROUND)
def test_the_same_elsewhere_is_another_call(latest, name):
    given = tensors()
    with AROUND[name]():
        assert latest.find(given, SETTINGS) is None


def test_what_transforms_see_is_another_call(latest):
    found, (x, _, weight) = [], tensors()

    def noted(x):
        found.append(latest.find((x, None, weight), SETTINGS))
        return x.sum()

    torch.func.grad(noted)(x)
    torch.func.vmap(noted)(torch.stack([x, x]))
    torch.func.functionalize(noted)(x)
    make_fx(noted)(x)
    torch.compile(noted, backend="eager")(x)
    assert found == [None] * 5


def test_what_alternates_is_not_kept():
    latest = alike.Latest()
    for kept in ("a", "b") * 3:
        latest.keep(tensors(), SETTINGS, kept)
        assert latest.find(tensors(), SETTINGS) is None


@pytest.mark.parametrize("error", [AttributeError, TypeError])
def test_a_torch_without_guards_finds_nothing(latest, monkeypatch, error):
    """It has them in a private place, so what they are called may change."""

    def missing(*args, **kwargs):
        raise error("no such thing")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", missing)
    latest = alike.Latest()
    for _ in range(3):
        latest.keep(tensors(), SETTINGS, "kept")
    assert latest.find(tensors(), SETTINGS) is None
