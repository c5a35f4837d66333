"""PyTorch versions of the fla functions in slime's Qwen3-Next layers, for the reference on CPUs."""

from __future__ import annotations

import torch


class ShortConvolution(torch.nn.Conv1d):
    """Causal convolution of each packed sequence alone, then silu."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool):
        padding = {"groups": hidden_size, "padding": kernel_size - 1}
        super().__init__(hidden_size, hidden_size, kernel_size, bias=bias, **padding)

    def forward(self, x, cu_seqlens):
        ends = cu_seqlens.tolist()
        parts = [
            super(ShortConvolution, self).forward(x[:, a:b].transpose(1, 2))[..., : b - a]
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        return torch.nn.functional.silu(torch.cat(parts, -1)).transpose(1, 2), None


class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size: int, eps: float, activation: str, device, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x, gate):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return normed * torch.nn.functional.silu(gate)


def chunk_gated_delta_rule(*inputs, cu_seqlens=None, **options):
    """Apply the rule to each packed sequence alone, if slime passes cu_seqlens."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    if cu_seqlens is None:
        return rule(*inputs, **options)
    gates = {name: options.pop(name) for name in ("g", "beta")}
    ends = cu_seqlens.tolist()
    parts = [
        rule(*(x[:, a:b] for x in inputs), **{n: x[:, a:b] for n, x in gates.items()}, **options)[0]
        for a, b in zip(ends, ends[1:], strict=False)
        if a < b
    ]
    return torch.cat(parts, 1), None


MODULES = {
    "fla.modules": {
        "FusedRMSNormGated": FusedRMSNormGated,
        "ShortConvolution": ShortConvolution,
    },
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}
