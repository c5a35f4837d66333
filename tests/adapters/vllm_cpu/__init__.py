"""vLLM's and vllm-ascend's own source on a CPU, in a process of its own: see `stand_ins`."""
