"""A stand-in for CANN's Python package, of which vllm-ascend names one function at import."""
