"""Declaration of rope: its arguments besides q and k, and its implementations."""

from __future__ import annotations

from npu_ops.ops.rope import aclnn, reference
from npu_ops.ops.rope.rotation import Rotation

rotate = Rotation(
    "rope",
    tables="Tensor cos, Tensor sin, Tensor? positions, str layout, str pair_layout, bool inverse, "
    "int rotary_dim",
    reference=reference.rope,
    aclnn_why_not=aclnn.why_not,
)
