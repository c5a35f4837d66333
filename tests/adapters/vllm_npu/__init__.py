"""vLLM's engine with vllm-ascend on the emulated NPU, in a process of its own: see `stand_ins`."""
