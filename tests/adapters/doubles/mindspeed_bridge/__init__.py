"""A stand-in for MindSpeed-Bridge: its Gated Delta Net layer and its rope, for Qwen3.5."""
