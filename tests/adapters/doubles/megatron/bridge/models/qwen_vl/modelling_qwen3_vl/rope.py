"""Qwen3-VL's rope: takes freqs per token; imports Megatron's unfused function by value."""

from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd


def apply_rotary_pos_emb_thd_absolute(t, cu_seqlens, freqs, rotary_interleaved=False):
    rows = _apply_rotary_pos_emb_bshd(t[:, None], freqs, rotary_interleaved=rotary_interleaved)
    return rows.squeeze(1)


def apply_rotary_pos_emb_absolute(t, freqs, config, cu_seqlens=None):
    assert not config.apply_rope_fusion
    wide = t.float() if config.apply_rotary_pos_emb_in_fp32 else t
    interleaved = config.rotary_interleaved
    if cu_seqlens is None:
        out = _apply_rotary_pos_emb_bshd(wide, freqs, rotary_interleaved=interleaved)
    else:
        out = apply_rotary_pos_emb_thd_absolute(wide, cu_seqlens, freqs, interleaved)
    return out.to(t.dtype)
