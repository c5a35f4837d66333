"""`python -m npu_ops` is `npu-ops`."""

from npu_ops.tools.cli import main

main()
