"""MindSpeed's rope: functions with the parameters of an earlier Megatron."""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import _rotate_half

from mindspeed import BRANCH, CALLS
from mindspeed.args_utils import get_full_args


def apply_rotary_pos_emb_bshd(
    t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0
):
    CALLS.append("bshd")
    assert getattr(get_full_args(), "use_fused_rotary_pos_emb") in (False, True)  # noqa: B009
    if multi_latent_attention:
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    if getattr(get_full_args(), "rope_scaling_type", None) == "yarn":
        mscale = get_full_args().yarn_scale  # the mscale that was passed is ignored
    width = freqs.shape[-1]
    t, rest = t[..., :width], t[..., width:]
    cos, sin = ((f(freqs) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
    return torch.cat((t * cos + _rotate_half(t, rotary_interleaved) * sin, rest), dim=-1)


def apply_rotary_pos_emb_thd(
    t, cu_seqlens, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0
):
    """Apply rope as MindSpeed does with reset_attention_mask.

    cu_seqlens: not a tensor, but an object with `position_ids`.
    """
    CALLS.append("thd")
    return apply_rotary_pos_emb_bshd(t, freqs[cu_seqlens.position_ids], rotary_interleaved)


def _dispatch(t, freqs, config, cu_seqlens, mscale, **group):
    from megatron.core.models.common.embeddings import rope_utils

    CALLS.append("dispatcher")
    if config.apply_rope_fusion:
        config.apply_rope_fusion = False  # apex is not installed
    options = {
        "rotary_interleaved": config.rotary_interleaved,
        "multi_latent_attention": config.multi_latent_attention,
        "mscale": mscale,
    }
    if cu_seqlens is None:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, **options)
    return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, **options, **group)


if BRANCH == "core_r0.12":

    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0):
        return _dispatch(t, freqs, config, cu_seqlens, mscale)

else:

    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None):
        # One version of MindSpeed ignores cp_group, too.
        return _dispatch(t, freqs, config, cu_seqlens, mscale)
