"""A double of CANN's Python package, of which vllm-ascend names one function as it is imported."""
