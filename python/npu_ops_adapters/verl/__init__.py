"""verl 0.9: patches with which npu-ops' operators work in models that verl has changed.

- `npu_patches`: verl's own NPU patches do not overwrite functions that npu-ops has replaced.
- `ulysses`: layers exchange tokens and heads if Ulysses splits a sequence over ranks.
- `log_probs`: log-probabilities are in fp32.
- `vision_position`: a vision tower's position embedding equals the servers' bit for bit.
- `gated_delta_net`: one call of Gated Delta Net computes packed sequences, also with Ulysses.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.verl import gated_delta_net, log_probs, npu_patches, vision_position


def patches() -> Iterable[Patch]:
    """Yield all patches."""
    yield from gated_delta_net.patches()
    yield from log_probs.patches()
    yield from npu_patches.patches()
    yield from vision_position.patches()
