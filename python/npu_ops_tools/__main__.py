"""`python -m npu_ops_tools` is `npu-ops`."""

from npu_ops_tools.cli import main

main()
