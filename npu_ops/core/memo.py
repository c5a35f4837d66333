"""Remembers what was made: of a tensor in host memory by what it contains, of the rest by a key."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from npu_ops.core.library import readable

Made = TypeVar("Made")

# Ten times as fast as torch.equal, and NaN is equal to itself.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Bounded(dict):
    """A dict of at most so many keys: before one more it is emptied. Keys come few, or ever new."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key, value) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, value)


class ByContents:
    """The last few results of functions of a tensor.

    A copy of the tensor is kept and compared bit by bit, for nothing else tells that memory has
    changed: a tensor's version does not count what collectives, NumPy or DLPack write. Reading a
    device's memory would wait for it and freeze the values into a captured graph, so what is made
    from a tensor on a device is made each time.
    """

    def __init__(self, size: int = 4):
        self._size = size
        self._entries: tuple[tuple[Hashable, torch.Tensor, object], ...] = ()

    def get(self, tensor: torch.Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, or what it returned for the same contents and key."""
        if not readable(tensor) or tensor.is_neg():
            return make()  # is_neg: its memory holds the opposite of what it contains
        known = (tensor.shape, tensor.stride(), tensor.dtype, key)
        for entry in self._entries:
            if entry[0] == known and _same(entry[1], tensor):
                return entry[2]
        with torch.inference_mode(False):  # what is made while evaluating serves training too
            copy, made = tensor.detach().clone(), make()
        if copy.stride() == tensor.stride():  # else there are gaps in its memory
            self._entries = ((known, copy, made), *self._entries)[: self._size]
        return made


def _same(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors without gaps, of one dtype and the same strides, are equal in bits."""
    return not _memcmp(copy.data_ptr(), tensor.data_ptr(), copy.nbytes)
