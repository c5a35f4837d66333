"""vLLM's and vllm-ascend's own source on a CPU, in another process; see `stand_ins`."""
