"""TensorCache: one result for one tensor, never a stale one."""

import gc
import weakref

import pytest
import torch

from npu_ops.core.memo import TensorCache


@pytest.fixture
def cache():
    return TensorCache(size=2)


class Maker:
    """Makes a new object each time and counts."""

    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return object()


@pytest.fixture
def make():
    return Maker()


def test_made_once(cache, make):
    x = torch.ones(3)
    assert cache.get(x, "key", make) is cache.get(x, "key", make)
    assert make.made == 1


@pytest.mark.parametrize(
    "alias", [torch.Tensor.detach, lambda x: x[:], lambda x: x.view(3, 4), lambda x: x.view_as(x)]
)
def test_an_alias_of_the_same_elements_is_the_same_tensor(cache, make, alias):
    x = torch.ones(3, 4)
    assert cache.get(x, "key", make) is cache.get(alias(x), "key", make)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.clone(),
        lambda x: x[:2],
        lambda x: x[1:],
        lambda x: x.view(4, 3),
        lambda x: x.t(),
        lambda x: x[:, :2],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.to("meta"),
        lambda x: x.view(torch.int32),
    ],
    ids=[
        "copy",
        "fewer rows",
        "later rows",
        "shape",
        "strides",
        "columns",
        "expanded",
        "device",
        "dtype",
    ],
)
def test_anything_else_is_another_tensor(cache, make, other):
    x = torch.ones(3, 4)
    assert cache.get(x, "key", make) is not cache.get(other(x), "key", make)


@pytest.mark.parametrize(
    "update",
    [
        lambda x: x.add_(1),
        lambda x: x[0].zero_(),
        lambda x: x.detach().mul_(2),
        lambda x: x.copy_(torch.zeros(3, 4)),
        lambda x: torch.nn.init.normal_(x),
    ],
    ids=["in place", "through a row", "through an alias", "copy_", "init"],
)
def test_an_update_makes_another_tensor(cache, make, update):
    x = torch.ones(3, 4)
    before = cache.get(x, "key", make)
    update(x)
    assert cache.get(x, "key", make) is not before


def test_keys_are_apart(cache, make):
    x = torch.ones(3)
    assert cache.get(x, 1.0, make) is not cache.get(x, 2.0, make)
    assert make.made == 2


def test_an_address_is_not_given_to_another_tensor(cache, make):
    """The entry keeps its tensor alive, so equal addresses are equal tensors."""
    seen = set()
    for _ in range(2):
        x = torch.full((1000,), float(len(seen)))
        seen.add(id(cache.get(x, "key", make)))
        del x
    assert make.made == 2


def test_the_oldest_entry_goes(cache, make):
    tensors = [torch.ones(3) for _ in range(3)]
    first, second, third = (cache.get(t, "key", make) for t in tensors)
    assert cache.get(tensors[1], "key", make) is second
    assert cache.get(tensors[2], "key", make) is third
    assert cache.get(tensors[0], "key", make) is not first


def test_a_dropped_tensor_is_freed(cache, make):
    x = torch.ones(3)
    alive = weakref.ref(x)
    cache.get(x, "key", make)
    del x
    for _ in range(2):
        cache.get(torch.ones(3), "key", make)
    gc.collect()
    assert alive() is None


def test_inference_tensors_are_not_remembered(cache, make):
    """They have no version to know an update by."""
    with torch.inference_mode():
        x = torch.ones(3)
        cache.get(x, "key", make)
        x.add_(1)
        cache.get(x, "key", make)
    assert make.made == 2


def test_what_inference_made_serves_training(cache):
    """A tensor made under inference_mode could not be saved for backward."""
    x = torch.ones(3)
    with torch.inference_mode():
        cache.get(x, "key", lambda: x.cos())
    weight = torch.ones(3, requires_grad=True)
    (weight * cache.get(x, "key", lambda: x.cos())).sum().backward()
    torch.testing.assert_close(weight.grad, x.cos())


def test_an_error_is_not_remembered(cache, make):
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        cache.get(x, "key", lambda: 1 / 0)
    cache.get(x, "key", make)
    assert make.made == 1
