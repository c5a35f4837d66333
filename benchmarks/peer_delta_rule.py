"""Lists other projects' wrappers of Gated Delta Net: functions and arguments by project.

In each project, the forward of the chunked delta rule calls six functions, listed in this order; q
and k are normalised before. vllm-ascend's own forward runs the last two in AscendC; this file calls
their Triton versions, which it also contains. No project's time includes torch's work between the
kernels, mainly copies to other layouts.
"""

from __future__ import annotations

import functools

import torch

BF16 = torch.bfloat16
CHUNK, DIM = 64, 128
SGL, VLLM, MINDSPEED = "sgl_kernel_npu.fla", "vllm_ascend.ops.triton.fla", "mindspeed.ops.triton"
VLLM_STAGES = {
    "cumsum": f"{VLLM}.cumsum:chunk_local_cumsum",
    "kkt": f"{VLLM}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd",
    "solve_tril": f"{VLLM}.solve_tril:solve_tril",
    "wy_fast": f"{VLLM}.wy_fast:recompute_w_u_fwd",
    "chunk_h": f"{VLLM}.chunk_delta_h:chunk_gated_delta_rule_fwd_h",
    "chunk_o": f"{VLLM}.chunk_o:chunk_fwd_o",
}


def rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def chunked(batch: int, tokens: int, heads: int, value_heads: int) -> dict[str, list]:
    """Return each project's functions, each with a function that makes its arguments."""
    size = batch, tokens, heads, value_heads
    return {
        "sgl": _stages(size, {
            "cumsum": f"{SGL}.cumsum:chunk_local_cumsum",
            "kkt": f"{SGL}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_npu",
            "solve_tril": f"{SGL}.solve_tril:solve_tril_npu",
            "wy_fast": f"{SGL}.wy_fast:recompute_w_u_fwd_npu",
            "chunk_h": f"{SGL}.chunk_delta_h:chunk_gated_delta_rule_fwd_h_npu",
            "chunk_o": f"{SGL}.chunk_o:chunk_fwd_o_npu",
        }, sums="g_cumsum", packed=True),
        "vllm": _stages(size, VLLM_STAGES, sums="g_cumsum", packed=True),
        "fla": _stages(size, {
            "cumsum": "fla.ops.utils.backends.triton_ascend.cumsum:chunk_local_cumsum_npu",
            "kkt": "fla.ops.common.backends.triton_ascend.chunk_scaled_dot_kkt:"
                   "chunk_scaled_dot_kkt_fwd_npu",
            "solve_tril": "fla.ops.utils.backends.triton_ascend.solve_tril:solve_tril_npu",
            "wy_fast": "fla.ops.gated_delta_rule.backends.triton_ascend.wy_fast:"
                       "recompute_w_u_fwd_npu",
            "chunk_h": "fla.ops.common.backends.triton_ascend.chunk_delta_h:"
                       "chunk_gated_delta_rule_fwd_h_npu",
            "chunk_o": "fla.ops.common.backends.triton_ascend.chunk_o:chunk_fwd_o_npu",
        }),
        # As many key heads as value heads: MindSpeed repeats the key heads before these calls.
        "mindspeed": _stages((batch, tokens, value_heads, value_heads), {
            "cumsum": f"{MINDSPEED}.cumsum:chunk_local_cumsum",
            "kkt": f"{MINDSPEED}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd",
            "solve_tril": f"{MINDSPEED}.solve_tril:solve_tril",
            "wy_fast": f"{MINDSPEED}.wy_fast:recompute_w_u_fwd",
            "chunk_h": f"{MINDSPEED}.chunk_delta_h:chunk_gated_delta_rule_fwd_h",
            "chunk_o": f"{MINDSPEED}.chunk_o:chunk_fwd_o",
        }, heads_first=True),
    }  # fmt: skip


def _stages(size, functions, **layout) -> list:
    return [
        (function, functools.partial(_arguments, stage, *size, **layout))
        for stage, function in functions.items()
    ]


def _arguments(
    stage, batch, tokens, heads, value_heads, sums="g", packed=False, heads_first=False
) -> dict:
    """Return the arguments of one function.

    sums: the function's argument for the cumulative sums of gates. packed: call wy_fast with packed
    sequences, because its kernel reads a name that is set only for those.
    """
    gates = torch.zeros(batch, tokens, value_heads)
    beta, scale = rows(batch, tokens, value_heads), DIM**-0.5
    k, v = (rows(batch, tokens, n, DIM) for n in (heads, value_heads))
    square = rows(batch, tokens, value_heads, CHUNK)
    if stage == "cumsum":
        return {"g": gates, "chunk_size": CHUNK}
    if stage == "kkt":
        return {"k": k, "beta": beta, sums: gates}
    if stage == "solve_tril":
        return {"A": square.float(), "output_dtype": BF16}
    if stage == "wy_fast":
        given = {"k": k, "v": v, "beta": beta, "A": square, sums: gates}
        if not packed:
            return given
        starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
        return {n: x.flatten(0, 1)[None] for n, x in given.items()} | {"cu_seqlens": starts}
    if stage == "chunk_h":
        return {"k": k, "w": v, "u": v, "g": gates, "output_final_state": True}
    states = rows(batch, -(-tokens // CHUNK), value_heads, DIM, DIM)
    states = states.transpose(1, 2).contiguous() if heads_first else states
    return {"q": k, "k": k, "v": v, "h": states, "g": gates, "scale": scale}


def decoding(batch: int, heads: int, value_heads: int) -> dict[str, list]:
    """Return calls for one token of each sequence; the projects' states have keys first."""
    states = functools.partial(torch.empty, batch, value_heads, DIM, DIM)

    def qkv(first, second):
        q, k = (rows(first, second, heads, DIM) for _ in range(2))
        return {"q": q, "k": k, "v": rows(first, second, value_heads, DIM)}

    def gated(first, second):
        return qkv(first, second) | {
            "A_log": torch.zeros(value_heads), "a": rows(first, second, value_heads),
            "b": rows(first, second, value_heads), "dt_bias": torch.zeros(value_heads),
            "softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_source": states(),
            "initial_state_indices": torch.arange(batch, dtype=torch.int32),
            "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip

    def vllm():
        return gated(1, batch) | {"cu_seqlens": torch.arange(batch + 1, dtype=torch.int32)}

    def fla():
        return qkv(batch, 1) | {
            "g": torch.zeros(batch, 1, value_heads), "beta": rows(batch, 1, value_heads),
            "scale": DIM**-0.5, "initial_state": states(), "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip

    return {
        "sgl": [(f"{SGL}.fused_sigmoid_gating_recurrent:"
                 "fused_sigmoid_gating_delta_rule_update_npu", lambda: gated(batch, 1))],
        "vllm_released": [
            (f"{VLLM}.sigmoid_gating:fused_sigmoid_gating_delta_rule_update", vllm)
        ],
        "fla": [("fla.ops.gated_delta_rule.fused_recurrent:fused_recurrent_gated_delta_rule_fwd",
                 fla)],
    }  # fmt: skip


def convolution(tokens: int, channels: int) -> dict[str, list]:
    return {
        "fla": [("fla.modules.backends.triton_ascend.causal_conv1d:causal_conv1d_fwd_npu", lambda: {
            "x": rows(1, tokens, channels), "weight": rows(channels, 4), "bias": None,
            "residual": None, "activation": "silu",
        })],
    }  # fmt: skip


def convolution_step(batch: int, channels: int) -> dict[str, list]:
    def given(state, weight):
        return {
            "x": rows(batch, channels), "conv_state": rows(batch, *state),
            "weight": rows(*weight), "activation": "silu",
            "conv_state_indices": torch.arange(batch, dtype=torch.int32),
        }  # fmt: skip

    last = functools.partial(given, (3, channels), (4, channels))
    first = functools.partial(given, (channels, 3), (channels, 4))
    return {
        "sgl": [("sgl_kernel_npu.mamba.causal_conv1d:causal_conv1d_update_v2", last)],
        "vllm": [("vllm_ascend.ops.triton.mamba.causal_conv1d:causal_conv1d_update_npu", first)],
    }
