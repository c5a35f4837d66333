"""Compare attention with torch's: a causal prompt, decoding from a paged cache, packed images."""

import dataclasses
import types

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, ON_NPUS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from npu_ops.ops.attention import cases

TEXT = ("qwen3-vl-8b", "qwen3.5-9b", "qwen3-next-80b-a3b")
IMAGES = 8


def prompt(op, model, size):
    return dataclasses.replace(cases.of_model(model, size)[0], sequences=1)


def decode(op, model, size):
    """Return a decode case: a token of each of 8 sequences, about `size` keys in a paged cache."""
    return cases.Case(
        "decode", 1, model.heads, model.kv_heads, model.head_dim, more=size - 1, keys="paged",
        block_size=128, sequences=8,
    )  # fmt: skip


def vision(op, model, size):
    """Return a case of images of equal size, so that `size` determines the work."""
    if model.vision is None:
        return None
    heads, dim = model.vision
    return Images("vision", size, heads, heads, dim, layout="TND", keys="packed")


@dataclasses.dataclass(frozen=True)
class Images(cases.Case):
    """A case of IMAGES packed images; `tokens` is the number of patches of all images together."""

    def inputs(self, dtype, device="cpu", seed=0):
        starts = torch.arange(0, self.tokens + 1, self.tokens // IMAGES)
        made = super().inputs(dtype, device, seed)
        lengths = {"cu_seqlens_q": starts.to(device), "cu_seqlens_cpu": starts}
        return {x: made[x] for x in "qkv"} | {"layout": "TND"} | lengths


def plain(inputs):
    return {x: inputs[x] for x in "qkv"} | {"is_causal": inputs["is_causal"]}


def sdpa(q, k, v, is_causal):
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*rows, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2)


def eager(q, k, v, is_causal):
    """Run transformers' attn_implementation="eager"."""
    layer = types.SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    tokens, scale = q.shape[1], q.shape[3] ** -0.5
    mask = torch.full((tokens, tokens), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return eager_attention_forward(layer, *rows, mask, scale)[0]


def gathered(q, k, v, block_table, seqlens_k, **rest):
    """Gather the paged keys and values first, as a server without a paged kernel does."""
    width = block_table.shape[1] * k.shape[1]
    mask = torch.arange(width, device=q.device) < seqlens_k.view(-1, 1, 1, 1)
    k, v = (x[block_table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def masked(q, k, v, cu_seqlens_q, **rest):
    """Run all images in one call, with a mask that separates them."""
    image = torch.repeat_interleave(torch.arange(IMAGES), cu_seqlens_q.diff()).to(q.device)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*rows, attn_mask=image[:, None] == image)
    return out[0].transpose(0, 1)


def image_by_image(q, k, v, cu_seqlens_q, **rest):
    """Run one image at a time, as transformers' vision towers do without flash-attn."""
    lengths = cu_seqlens_q.diff().tolist()
    rows = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*row) for row in rows], 2)[0].transpose(0, 1)


def flop(case):
    """Return the floating-point operations of two matrix products over all query-key pairs.

    If causal, half of the pairs count.
    """
    pairs = case.tokens * (case.tokens + case.more)
    if isinstance(case, Images):
        pairs //= IMAGES
    batch = case.sequences if case.keys == "paged" else 1
    return 4 * batch * pairs * case.heads * case.dim // (2 if case.causal else 1)


def cache(case, inputs):
    """Return the bytes of q, out, and the keys and values in use, without the rest of the pool."""
    rows = inputs["seqlens_k"].sum().item()
    return 2 * rows * inputs["k"][0, 0].nbytes + 2 * inputs["q"].nbytes


SWEEPS = [
    Sweep(
        "attention",
        peers={"SDPA": lambda: sdpa, "eager": lambda: eager, "flash-attn": ON_GPUS},
        label="causal prompt",
        models=TEXT,
        case=prompt,
        prepare=plain,
        sizes=(2, 16, 64, 512, 2048),  # with one token, q and k have no gradient
        backward_to=512,
        exact_to=512,
        at_most={"eager": 512},
        flop=flop,
    ),
    Sweep(
        "attention",
        peers={"SDPA, keys gathered": lambda: gathered, "torch_npu": ON_NPUS},
        label="decoding, 8 sequences",
        models=TEXT,
        case=decode,
        unit="keys",
        sizes=(32, 128, 512, 2048, 8192),
        backward_to=0,
        exact_to=512,
        moved=cache,
        flop=flop,
    ),
    Sweep(
        "attention",
        peers={
            "SDPA, one mask": lambda: masked,
            "SDPA, image by image": lambda: image_by_image,
            "flash-attn": ON_GPUS,
        },
        label=f"{IMAGES} images",
        models=("qwen3-vl-8b",),
        case=vision,
        unit="patches",
        sizes=(64, 256, 1024, 4096, 8192),
        backward_to=1024,
        exact_to=1024,
        at_most={"SDPA, one mask": 4096},
        flop=flop,
    ),
]
