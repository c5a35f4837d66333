"""`python -m npu_ops.tools.compile` is `npu-ops compile`."""

import sys

from npu_ops.tools.compile.cli import main

sys.exit(main())
