"""verl 0.9: what it does to a model, where that and an operator of ours have to agree.

Here are its NPU patches, which leave ours in force (`npu_patches`), Ulysses, which spreads tokens
over ranks in a way that the functions of a layer must know (`ulysses`), and the Gated Delta Net of
packed sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.verl import gated_delta_net, npu_patches


def patches() -> Iterable[Patch]:
    """All of them."""
    yield from gated_delta_net.patches()
    yield from npu_patches.patches()
