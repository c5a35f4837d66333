"""Remembers what was made from a tensor for as long as the tensor has not changed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from npu_ops.core.library import is_plain

Made = TypeVar("Made")


class TensorCache:
    """The last few results of functions of a tensor.

    A tensor is known by its memory and its version, so a detached alias (activation checkpointing
    makes one) is the same tensor and an in-place update makes it another. An entry keeps its tensor
    alive: its address is not given to another one meanwhile.
    """

    def __init__(self, size: int = 4):
        self._size = size
        self._entries: collections.OrderedDict[Hashable, tuple[torch.Tensor, object]] = (
            collections.OrderedDict()
        )

    def get(self, tensor: torch.Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, or what it returned last time for this tensor and key."""
        if not is_plain(tensor) or tensor.is_inference():
            return make()  # no address, or no version, to know it by
        layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = (tensor.data_ptr(), tensor._version, *layout, key)
        entry = self._entries.get(known)
        if entry is None:
            with torch.inference_mode(False):  # what is made while evaluating serves training too
                entry = self._entries[known] = (tensor, make())
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return entry[1]
