"""Wraps the NPU kernel that splits, normalizes and rotates Qwen3's and Llama's projection.

sgl-kernel-npu changed the order of the kernel's arguments between two releases of one month. This
replacement accepts both orders and calls the kernel with named arguments. npu-ops computes the
calls that the kernel does not support.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions, hooks

_SIZES, _WEIGHTS = ("q_hidden_size", "kv_hidden_size", "head_dim"), ("q_weight", "k_weight")
_HEAD, _BIASES = ("input", "sin", "cos"), ("q_bias", "k_bias")
WEIGHTS_FIRST = (*_HEAD, *_WEIGHTS, *_SIZES, "eps", *_BIASES)
SIZES_FIRST = (*_HEAD, *_SIZES, "eps", *_WEIGHTS, *_BIASES)


def patches() -> Iterable[Patch]:
    """Patch `split_qkv_rmsnorm_rope` in the models' modules; it exists only with an NPU."""
    if not functions.on_npu():
        return
    newer = ["dflash"] if functions.since("0.5.15") else []
    for model in ("llama", "qwen3", "qwen3_moe", *newer):
        yield Patch(
            target=f"sglang.srt.models.{model}:split_qkv_rmsnorm_rope",
            op="split_qkv_rmsnorm_rope",
            make=replace,
            why=(
                "the order of its arguments changed, and it fails for heads that are no "
                "power of two"
            ),
            signatures=(WEIGHTS_FIRST, SIZES_FIRST, (*SIZES_FIRST, "is_neox_style")),
            versions=functions.VERSIONS,
            remove_when="no sgl-kernel-npu of 2025 is in use",
            by=hooks.who_applies(),
        )


def replace(original: Callable) -> Callable:
    """Return a function that accepts both orders and calls `original` with its own names."""
    parameters = inspect.signature(original).parameters.values()
    known = {parameter.name for parameter in parameters}
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_split_qkv_rmsnorm_rope(*args, **kwargs):
        call = read(*args, **kwargs)
        width = call["head_dim"]
        if width & (width - 1) or not needed <= call.keys() <= known:
            return compute(**call)
        return original(**call)

    return npu_ops_split_qkv_rmsnorm_rope


def read(*args, **kwargs) -> dict:
    """Return a call's arguments by name.

    The fourth positional argument tells the order: a tensor is a weight, a number is a size.
    """
    fourth = args[3] if len(args) > 3 else None
    names = WEIGHTS_FIRST if isinstance(fourth, torch.Tensor) else SIZES_FIRST
    return dict(zip((*names, "is_neox_style"), args, strict=False)) | kwargs


def compute(
    input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps=None, q_weight=None,
    k_weight=None, q_bias=None, k_bias=None, is_neox_style=True,
):  # fmt: skip
    """Return q, k and v of `[T, q + 2 kv]`; sin and cos are `[T, 1, 1, R]`, R up to head_dim."""
    cos, sin = cos.flatten(1), sin.flatten(1)
    pairs = {"pair_layout": "half" if is_neox_style else "interleaved", "rotary_dim": cos.shape[1]}
    if not is_neox_style:  # the first half of a row of cos and sin has one value for each pair
        cos, sin = (x[:, : x.shape[1] // 2].repeat_interleave(2, dim=1) for x in (cos, sin))
    if eps is not None and q_bias is None and k_bias is None:
        *heads, _ = npu_ops.qk_norm_rope(
            input, q_weight, k_weight, cos, sin, num_heads=q_hidden_size // head_dim,
            num_kv_heads=kv_hidden_size // head_dim, eps=eps, **pairs,
        )  # fmt: skip
        return tuple(x.flatten(1) for x in heads)
    sizes = [q_hidden_size, kv_hidden_size, kv_hidden_size]
    q, k, v = input.split(sizes, dim=-1)
    q, k = (
        norm(x.unflatten(-1, (-1, head_dim)), weight, bias, eps)
        for x, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias))
    )
    npu_ops.apply_rotary_pos_emb(q, k, cos, sin, layout="TND", inplace=True, **pairs)
    return q.flatten(1), k.flatten(1), v.contiguous()


def norm(x, weight, bias, eps):
    """Normalize in fp32, as the kernel does. Always returns a copy."""
    if eps is None:
        return x.clone()
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (x32 if bias is None else x32 + bias.float()).to(x.dtype)
