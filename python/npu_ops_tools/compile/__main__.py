"""`python -m npu_ops_tools.compile` is `npu-ops compile`."""

import sys

from npu_ops_tools.compile.cli import main

sys.exit(main())
