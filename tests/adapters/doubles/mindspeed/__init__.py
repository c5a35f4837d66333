"""A double of MindSpeed: its patch manager, its list of features and those that meet npu-ops.

Written for these tests. It does what core_r0.12, core_r0.16 and core_r0.18 do, chosen by
MINDSPEED_DOUBLE: which patches there are, in which order, and what is kept when they are removed.
"""

import os

BRANCH = os.environ.get("MINDSPEED_DOUBLE", "core_r0.16")
CALLS = []  # of MindSpeed's own functions, by name
