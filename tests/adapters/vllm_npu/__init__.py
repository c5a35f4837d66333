"""vLLM's engine with vllm-ascend on the emulated NPU, in another process; see `stand_ins`."""
