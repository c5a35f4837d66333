"""A double of MindSpeed-Bridge: its layer of Gated Delta Net and its rope, for Qwen3.5."""
