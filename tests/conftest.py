"""Every output is NaN before a kernel writes it, so that an element it forgets shows."""

from npu_ops.core import library

library.poison_outputs = True
