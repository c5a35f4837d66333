"""slime v0.2.2's Qwen3-Next: the delta rule does not get cu_seqlens."""


def chunk_gated_delta_rule(x, cu_seqlens=None):
    return cu_seqlens


class Qwen3NextGatedDeltaNet:
    def conv1d(self, x, cu_seqlens):
        return x

    def forward(self, hidden_states, cu_seqlens=None):
        return chunk_gated_delta_rule(self.conv1d(hidden_states, cu_seqlens=cu_seqlens))
