"""core_r0.18: the operators of Gated Delta Net, chosen when a layer is built."""

from dataclasses import dataclass
from typing import Any

from mindspeed import CALLS


@dataclass(frozen=True)
class GdnOperators:
    name: str
    causal_conv1d: Any
    l2norm: Any
    chunk_gated_delta_rule: Any


def causal_conv1d(
    x, weight, bias=None, activation=None, initial_state=None, output_final_state=False,
    cu_seqlens=None,
):  # fmt: skip
    CALLS.append("causal_conv1d")
    return x, None


def l2norm(x, eps=1e-6, output_dtype=None):
    CALLS.append("l2norm")
    return x


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, chunk_size=64, head_first=False,
):  # fmt: skip
    CALLS.append("chunk_gated_delta_rule")
    return v, None


def load_gdn_operators():
    return GdnOperators("mindspeed", causal_conv1d, l2norm, chunk_gated_delta_rule)
