"""A double of MindSpeed: its patch manager, its list of features, and the features npu-ops meets.

Written for these tests. MINDSPEED_DOUBLE chooses between core_r0.12, core_r0.16 and core_r0.18.
These differ in the patches, in their order, and in what stays when patches are removed.
"""

import os

BRANCH = os.environ.get("MINDSPEED_DOUBLE", "core_r0.16")
CALLS = []  # calls of MindSpeed's own functions, by name
