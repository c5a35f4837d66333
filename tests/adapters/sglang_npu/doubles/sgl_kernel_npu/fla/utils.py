"""Split a fused projection, in torch."""

import torch

from sgl_kernel_npu import absent as __getattr__  # noqa: F401


def fused_qkvzba_split_reshape_cat(qkvz, ba, key_heads, value_heads, keys, values):
    """Split a projection grouped by key head: q, k, then v and z of its value heads."""
    tokens, group = qkvz.shape[0], value_heads // key_heads
    wide, narrow = qkvz.view(tokens, key_heads, -1), ba.view(tokens, key_heads, -1)
    q, k, v, z = wide.split([keys, keys, group * values, group * values], dim=-1)
    b, a = narrow.split([group, group], dim=-1)
    qkv = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], dim=-1)
    return (
        qkv,
        z.reshape(tokens, value_heads, values),
        *(x.reshape(tokens, value_heads) for x in (b, a)),
    )


def fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, key_heads, value_heads, keys, values):
    """Split a projection with q of all heads first, then k, v and z; b and a are split likewise."""
    wide, narrow = [key_heads * keys] * 2 + [value_heads * values] * 2, [value_heads] * 2
    q, k, v, z = qkvz.split(wide, dim=-1)
    b, a = (x.contiguous() for x in ba.split(narrow, dim=-1))
    return torch.cat((q, k, v), dim=-1), z.unflatten(-1, (value_heads, values)), b, a


def prepare_chunk_indices(*args):
    raise NotImplementedError("npu-ops takes its place")
