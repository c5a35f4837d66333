"""Rotary embeddings: one lacks the argument `packed_seq_params`, the other has it."""


class Qwen3VLTextRotaryEmbedding:
    def forward(self, position_ids, mrope_section):
        return position_ids


class Qwen3VLMoETextRotaryEmbedding:
    def forward(self, position_ids, mrope_section, packed_seq_params=None):
        return position_ids, packed_seq_params
