"""ByContents: one result for what a tensor contains, never a stale one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from writes import WRITES

from npu_ops.core.memo import ByContents


@pytest.fixture
def cache():
    return ByContents(size=2)


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


def table():
    return torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "alike",
    [
        lambda x: x,
        torch.Tensor.detach,
        torch.Tensor.clone,
        lambda x: torch.nn.Parameter(x, requires_grad=False),
    ],
)
def test_made_once_for_what_it_contains(cache, make, alike):
    x = table()
    assert cache.get(x, "key", make) is cache.get(alike(x), "key", make)
    assert make.made == 1


def test_nan_is_itself_and_zeros_have_signs(cache, make):
    x = torch.full((3,), float("nan"))
    assert cache.get(x, "key", make) is cache.get(x.clone(), "key", make)
    zero = torch.zeros(3)
    assert cache.get(zero, "key", make) is not cache.get(-zero, "key", make)


@pytest.mark.parametrize("permuted", [(0, 1), (1, 0)])
def test_any_order_in_memory(cache, make, permuted):
    x = table().permute(permuted)
    first = cache.get(x, "key", make)
    assert cache.get(x, "key", make) is first
    x[2, 2] = 77
    assert cache.get(x, "key", make) is not first


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:2],
        lambda x: x[1:],
        lambda x: x.view(4, 3),
        lambda x: x.t().contiguous().t(),
        lambda x: x.view(torch.int32),
        lambda x: x + 1,
    ],
    ids=["fewer rows", "later rows", "shape", "strides", "dtype", "values"],
)
def test_anything_else_is_another_tensor(cache, make, other):
    x = table()
    assert cache.get(x, "key", make) is not cache.get(other(x), "key", make)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("make_tensor", [table, lambda: torch.from_numpy(table().numpy().copy())])
def test_however_memory_changes_it_is_seen(cache, make, write, make_tensor):
    x = make_tensor()
    before, version = cache.get(x, "key", make), x._version
    value = x.clone()
    value[2, 3] = -1
    write(x, value)
    assert x.equal(value) and x._version == version  # which is why no version is asked
    assert cache.get(x, "key", make) is not before


@pytest.mark.parametrize(
    "watched",
    [
        lambda x: x.to("meta"),
        lambda x: FakeTensorMode().from_tensor(x),
        lambda x: x[:, :2],  # memory between its elements
        lambda x: torch._neg_view(x),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["no memory", "fake", "gaps", "negated", "a gradient"],
)
def test_what_cannot_be_compared_is_made_each_time(cache, make, watched):
    x = watched(table())
    assert cache.get(x, "key", make) is not cache.get(x, "key", make)


def test_keys_are_apart(cache, make):
    x = torch.ones(3)
    assert cache.get(x, 1.0, make) is not cache.get(x, 2.0, make)
    assert make.made == 2


def test_the_oldest_entry_goes(cache, make):
    tensors = [torch.full((3,), float(n)) for n in range(3)]
    first, second, third = (cache.get(t, "key", make) for t in tensors)
    assert cache.get(tensors[1], "key", make) is second
    assert cache.get(tensors[2], "key", make) is third
    assert cache.get(tensors[0], "key", make) is not first


def test_nothing_of_the_caller_s_is_kept_alive(cache, make):
    import gc
    import weakref

    x = torch.ones(3)
    alive = weakref.ref(x)
    cache.get(x, "key", make)
    del x
    gc.collect()
    assert alive() is None


def test_inference_tensors_too(cache, make):
    with torch.inference_mode():
        x = torch.ones(3)
        first = cache.get(x, "key", make)
        assert cache.get(x, "key", make) is first
        x.add_(1)
        assert cache.get(x, "key", make) is not first


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
