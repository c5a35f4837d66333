"""A stand-in for MindSpeed: its patch manager, its features, and functions that npu-ops meets.

Written for these tests. MINDSPEED_DOUBLE selects core_r0.12, core_r0.16 or core_r0.18. These differ
in their patches, in the order of patches, and in what remains after patches are removed.
"""

import os

BRANCH = os.environ.get("MINDSPEED_DOUBLE", "core_r0.16")
CALLS = []  # calls of MindSpeed's own functions, by name
