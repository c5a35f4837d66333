"""Declaration of mrope: its arguments besides q and k, and its implementations."""

from __future__ import annotations

from npu_ops.ops.mrope import aclnn, reference
from npu_ops.ops.rope.rotation import Rotation

rotate = Rotation(
    "mrope",
    tables="Tensor cos, Tensor sin, Tensor? positions, int[] mrope_section, str section_layout, "
    "str layout, str pair_layout, bool inverse, int rotary_dim",
    reference=reference.mrope,
    aclnn_why_not=aclnn.why_not,
)
