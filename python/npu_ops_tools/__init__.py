"""The command-line tools of npu-ops."""
