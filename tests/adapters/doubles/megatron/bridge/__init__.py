"""A stand-in for Megatron-Bridge: the parts of its Qwen3-VL that npu-ops patches."""
