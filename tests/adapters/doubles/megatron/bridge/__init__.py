"""A double of Megatron-Bridge: what of its Qwen3-VL meets npu-ops. Written for these tests."""
