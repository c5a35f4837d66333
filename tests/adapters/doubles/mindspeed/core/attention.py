"""MindSpeed's attention: a forward, and a mask wrapper that passes seven positional arguments."""

import functools

from megatron.core.models.common.embeddings import apply_rotary_pos_emb  # noqa: F401

from mindspeed import CALLS


def forward(
    self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
    packed_seq_params=None,
):  # fmt: skip
    CALLS.append("attention")
    return query.flatten(2)


def mask_wrapper(fn):
    @functools.wraps(fn)
    def wrapper(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
        packed_seq_params=None,
    ):  # fmt: skip
        CALLS.append("mask")
        return fn(
            self, query, key, value, attention_mask, attn_mask_type, attention_bias,
            packed_seq_params,
        )  # fmt: skip

    return wrapper
