"""Computes Qwen3-Next's and Qwen3.5's gated projection where sgl-kernel-npu's kernels cannot.

sgl-kernel-npu has a kernel that splits, normalizes and rotates for decoding, and another one, with
mrope sections, for Qwen3.5's prefill. Both need a head dimension that is a power of two, and the
first needs a rotary dimension below the head dimension. npu-ops computes the other calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions, hooks
from npu_ops_adapters.sglang.split_qkv_rmsnorm_rope import norm

STEP = (
    *("input", "sin", "cos", "q_hidden_size", "kv_hidden_size", "head_dim", "rope_dim", "eps"),
    *("q_weight", "k_weight"),
)
PREFILL = (
    *("qkv", "q_weight", "k_weight", "cos_sin", "num_q_heads", "num_kv_heads", "head_size", "eps"),
    *("mrope_section", "is_interleaved", "rope_dim", "q_bias", "k_bias", "has_gate"),
)


def patches() -> Iterable[Patch]:
    """Patch the names in the models' modules. Without an NPU these names do not exist."""
    if not functions.on_npu() or not functions.since("0.5.15"):
        return
    for model in ("qwen3_next", "qwen3_5"):
        yield _patch(model, "split_qkvgate_gemma_rmsnorm_rope", replace_step, STEP)
    if functions.since("0.5.23"):
        yield _patch("qwen3_5", "triton_split_qkv_rmsnorm_mrope", replace_prefill, PREFILL)


def _patch(model: str, name: str, make: Callable, parameters: tuple[str, ...]) -> Patch:
    return Patch(
        target=f"sglang.srt.models.{model}:{name}",
        op="split_qkv_rmsnorm_rope",
        make=make,
        why="it fails for heads that are no power of two, and misreads other rotary dimensions",
        signatures=(parameters,),
        versions="SGLang 0.5.15 to 0.5.23",
        remove_when="sgl-kernel-npu takes every head dimension",
        by=hooks.who_applies(),
    )


def replace_step(original: Callable) -> Callable:
    """Return a function that calls `original` if its kernel supports the call."""

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_split_qkvgate(*args, **kwargs):
        call = dict(zip(STEP, args, strict=False)) | kwargs
        width, rotated = call["head_dim"], call["rope_dim"]
        whole = width & (width - 1) == 0 and call["q_hidden_size"] % call["kv_hidden_size"] == 0
        if whole and rotated < width and call["sin"].shape[-1] == rotated:
            return original(**call)
        return step(**call)

    return npu_ops_split_qkvgate


def replace_prefill(original: Callable) -> Callable:
    """Do the same as `replace_step` for prefill with mrope sections.

    The kernel needs sections that fill the rotary dimension.
    """

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_split_qkv_mrope(*args, **kwargs):
        call = dict(zip(PREFILL, args, strict=False)) | kwargs
        width, rotated = call["head_size"], call.get("rope_dim") or call["head_size"]
        if width & (width - 1) == 0 and 2 * sum(call["mrope_section"]) == rotated:
            return original(**call)
        return prefill(**call)

    return npu_ops_split_qkv_mrope


def step(
    input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, rope_dim, eps, q_weight, k_weight
):
    """Return q, k, v and the gate of `[T, 2 q + 2 kv]`; sin and cos are `[T, 1, 1, R]`.

    Each head's query is followed by its gate, and the norms multiply by 1 + weight. The first
    rope_dim elements of a head are rotated.
    """
    parts = npu_ops.qk_norm_rope(
        input, q_weight, k_weight, cos.flatten(1), sin.flatten(1),
        num_heads=q_hidden_size // head_dim, num_kv_heads=kv_hidden_size // head_dim, eps=eps,
        zero_centered=True, gated=True, rotary_dim=rope_dim,
    )  # fmt: skip
    return tuple(x.flatten(1) for x in parts)


def prefill(
    qkv, q_weight, k_weight, cos_sin, num_q_heads, num_kv_heads, head_size, eps, mrope_section,
    is_interleaved, rope_dim=None, q_bias=None, k_bias=None, has_gate=False,
):  # fmt: skip
    """Do the same as `step`, with mrope's three axes.
    Norms multiply by weight, not by 1 + weight, and the gate is optional.

    cos_sin: `[3, T, R]`, R being rope_dim or else head_size. mrope_section: need not fill the R / 2
    frequencies, see `fitted`.
    """
    rope_dim = rope_dim or head_size
    cos, sin = cos_sin.chunk(2, dim=-1)
    angles = {
        "mrope_section": fitted(mrope_section, is_interleaved, rope_dim // 2),
        "section_layout": "interleaved" if is_interleaved else "chunked", "rotary_dim": rope_dim,
    }  # fmt: skip
    if q_bias is None and k_bias is None:
        q, k, v, gate = npu_ops.qk_norm_rope(
            qkv, q_weight, k_weight, cos, sin, num_heads=num_q_heads, num_kv_heads=num_kv_heads,
            eps=eps, gated=has_gate, **angles,
        )  # fmt: skip
        gate = gate.flatten(1) if has_gate else qkv.new_empty(qkv.shape[0], 0)
        return q.flatten(1), k.flatten(1), v.flatten(1), gate
    sizes, weights = (num_q_heads * head_size, num_kv_heads * head_size), (q_weight, k_weight)
    q, k, v, gate = _split(qkv, *sizes, head_size, has_gate, weights, eps, (q_bias, k_bias))
    npu_ops.apply_multimodal_rotary_pos_emb(
        q, k, cos, sin, layout="TND", inplace=True, **angles
    )  # fmt: skip
    return q.flatten(1), k.flatten(1), v, gate


def fitted(section, is_interleaved: bool, frequencies: int) -> list[int]:
    """Return sections that cover all frequencies, as sgl-kernel-npu's test of its kernel counts.

    Frequencies outside all sections count as time if axes are interleaved, else as width.
    """
    t, h, w = section
    missing = max(0, frequencies - sum(section))
    return [t + missing, h, w] if is_interleaved else [t, h, w + missing]


def _split(x, queries, keys, width, gated, weights, eps, biases):
    """Return q and k `[T, N, D]`, normalized, and v and the gate `[T, ..]`."""
    fused, k, v = x.split([queries * (1 + gated), keys, keys], dim=-1)
    q, *gate = fused.unflatten(-1, (-1, 1 + gated, width)).unbind(2)
    heads = zip((q, k.unflatten(-1, (-1, width))), weights, biases, strict=True)
    q, k = (norm(y, weight, bias, eps) for y, weight, bias in heads)
    gate = gate[0].flatten(1) if gated else x.new_empty(x.shape[0], 0)
    return q, k, v.contiguous(), gate
