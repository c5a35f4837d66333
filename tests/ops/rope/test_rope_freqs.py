"""rope from angles: Megatron's form, also packed and under context parallelism."""

import itertools

import pytest
import torch
from rope_calls import BOTH_ROUND, IMPLEMENTATIONS, PAIRS, angles, qkv, rope_freqs
from support import (
    forced,
)
from torch.utils.checkpoint import checkpoint

from npu_ops.core.compare import assert_close


def megatron_loop(x, freqs, pair_layout, mscale=1.0, inverse=False):
    """Megatron's `_apply_rotary_pos_emb_bshd` on one [S, B, N, D], in fp64, pair by pair."""
    out = x.double().clone()
    angles, rotary_dim = freqs.double(), freqs.shape[-1]
    cos, sin = angles.cos() * mscale, angles.sin() * (-mscale if inverse else mscale)
    for j in range(rotary_dim // 2):
        one, two = (j, j + rotary_dim // 2) if pair_layout == "half" else (2 * j, 2 * j + 1)
        x1, x2 = x[..., one].double(), x[..., two].double()
        out[..., one] = x1 * cos[..., one] - x2 * sin[..., one]
        out[..., two] = x2 * cos[..., two] + x1 * sin[..., two]
    return out


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("batch", [1, 2], ids=["rope", "mrope"])
@pytest.mark.parametrize("mscale", [1.0, 1.3])
@pytest.mark.parametrize("inverse", [True, False])
def test_freqs(batch, mscale, inverse, pair_layout, implementation, device):
    q, k = (x.transpose(0, 1).to(device) for x in qkv(dim=24))
    freqs = angles(9, 16, pair_layout, batch).to(device)
    with forced(implementation, "rope"):
        outputs = rope_freqs(q, k, freqs, pair_layout=pair_layout, mscale=mscale, inverse=inverse)
    for x, out in zip((q, k), outputs, strict=True):
        expected = megatron_loop(x, freqs, pair_layout, mscale, inverse)
        assert_close("x", out, expected, BOTH_ROUND[torch.float32])


def zigzag(x, lengths, cp_size, cp_rank):
    """Return a rank's part of packed x: two of the 2 * cp_size chunks of each sequence."""
    parts = []
    for sequence in x.split(lengths):
        chunks = sequence.chunk(2 * cp_size) if len(sequence) else [sequence] * 2 * cp_size
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else [sequence]
    return torch.cat(parts)


def megatron_packed(x, freqs, lengths, cp_size, cp_rank, per_token, pair_layout, mscale):
    """Megatron's `_apply_rotary_pos_emb_thd`: rotate each sequence by its slices of freqs."""
    outputs, start = [], 0
    for n, sequence in zip(lengths, x.split([n // cp_size for n in lengths]), strict=True):
        offset = start if per_token else 0
        if cp_size > 1:
            piece = n // cp_size // 2
            first = freqs[offset + cp_rank * piece : offset + (cp_rank + 1) * piece]
            last = freqs[offset + n - (cp_rank + 1) * piece : offset + n - cp_rank * piece]
            mine = torch.cat((first, last))
        else:
            mine = freqs[offset : offset + n]
        outputs.append(megatron_loop(sequence[:, None], mine, pair_layout, mscale)[:, 0])
        start += n
    return torch.cat(outputs)


@IMPLEMENTATIONS
@PAIRS
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[16, 8, 40], [8], [8, 0, 24]], ids=str)
def test_packed_freqs(lengths, cp_size, per_token, pair_layout, implementation, device):
    total = sum(lengths)
    rows = total if per_token else max(lengths) + 3
    freqs = angles(rows, 16, pair_layout)
    q, k = torch.randn(total, 3, 24), torch.randn(total, 1, 24)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    for cp_rank in range(cp_size):
        local = [zigzag(x, lengths, cp_size, cp_rank) for x in (q, k)]
        with forced(implementation, "rope"):
            outputs = rope_freqs(
                *(x.to(device) for x in local), freqs.to(device), layout="TND", mscale=1.1,
                pair_layout=pair_layout, cu_seqlens=cu_seqlens.to(device),
                cp_size=cp_size, cp_rank=cp_rank,
                max_seqlen=max(lengths) if per_token and len(lengths) > 1 else None,
            )  # fmt: skip
        for x, out in zip(local, outputs, strict=True):
            expected = megatron_packed(
                x, freqs, lengths, cp_size, cp_rank, per_token, pair_layout, 1.1
            )
            assert_close("x", out.cpu(), expected, BOTH_ROUND[torch.float32])


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_together_are_the_whole(cp_size):
    """Each rank's rotated tokens equal its part of the whole, rotated at once."""
    lengths, freqs = [16, 48], angles(48, 16)
    q = torch.randn(64, 3, 16)
    packing = {"layout": "TND", "cu_seqlens": torch.tensor([0, 16, 64])}
    whole, _ = rope_freqs(q, None, freqs, **packing)
    for rank in range(cp_size):
        mine = zigzag(q, lengths, cp_size, rank)
        out, _ = rope_freqs(mine, None, freqs, cp_size=cp_size, cp_rank=rank, **packing)
        assert torch.equal(out, zigzag(whole, lengths, cp_size, rank))


def test_max_seqlen_says_which_freqs_are_per_token():
    """freqs with more rows than max_seqlen have a row per token, others a row per position.

    Without max_seqlen, freqs with as many rows as tokens have a row per token.
    """
    q, freqs, cu_seqlens = torch.randn(8, 1, 16), angles(8, 16), torch.tensor([0, 3, 8])
    packing = {"layout": "TND", "cu_seqlens": cu_seqlens}
    own = rope_freqs(q, None, freqs, layout="TND")[0]
    restarting = torch.cat(
        [rope_freqs(x, None, freqs[: len(x)], layout="TND")[0] for x in q.split((3, 5))]
    )
    assert torch.equal(rope_freqs(q, None, freqs, **packing)[0], own)
    assert torch.equal(rope_freqs(q, None, freqs, max_seqlen=5, **packing)[0], own)
    assert torch.equal(rope_freqs(q, None, freqs, max_seqlen=8, **packing)[0], restarting)


def test_padding_after_the_last_sequence_is_finite():
    q, freqs = torch.randn(12, 1, 16), angles(8, 16)
    out, _ = rope_freqs(
        q, None, freqs, layout="TND", cu_seqlens=torch.tensor([0, 3, 8]), max_seqlen=8
    )
    assert out.isfinite().all()
    expected = rope_freqs(
        q[:8], None, freqs, layout="TND", cu_seqlens=torch.tensor([0, 3, 8]), max_seqlen=8
    )
    assert torch.equal(out[:8], expected[0])


def test_bf16_freqs_are_not_rounded_again():
    """cos and sin of bf16 freqs are computed and kept in fp32."""
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16).bfloat16()
    out, _ = rope_freqs(q, None, freqs)
    assert_close("q", out, megatron_loop(q, freqs, "half"), BOTH_ROUND[torch.float32])


def test_freqs_of_no_tokens():
    q, freqs = torch.randn(0, 2, 1, 16), angles(0, 16)
    assert rope_freqs(q, q, freqs)[1].shape == q.shape
    packed = {"layout": "TND", "cu_seqlens": torch.tensor([0, 0])}
    assert rope_freqs(q[:, 0], None, angles(9, 16), **packed)[0].shape == (0, 1, 16)


def test_an_update_of_cu_seqlens_is_seen():
    q, freqs, cu_seqlens = torch.randn(8, 1, 16), angles(9, 16), torch.tensor([0, 3, 8])
    packing = {"layout": "TND", "cu_seqlens": cu_seqlens}
    before, _ = rope_freqs(q, None, freqs, **packing)
    cu_seqlens[1] = 5
    after, _ = rope_freqs(q, None, freqs, **packing)
    assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3:5], after[3:5])
    restarting = [rope_freqs(x, None, freqs[: len(x)], layout="TND")[0] for x in q.split((5, 3))]
    assert torch.equal(after, torch.cat(restarting))


def test_an_update_of_freqs_is_seen():
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16)
    for update in (lambda: freqs.mul_(2), lambda: freqs[3].zero_(), lambda: freqs.detach().add_(1)):
        rope_freqs(q, None, freqs)
        update()
        out, _ = rope_freqs(q, None, freqs)
        assert_close("q", out, megatron_loop(q, freqs, "half"), BOTH_ROUND[torch.float32])


def test_tables_of_an_inference_serve_training():
    """Megatron passes the same cached freqs to evaluation and to training."""
    q, freqs = torch.randn(9, 2, 1, 16, requires_grad=True), angles(9, 16)
    with torch.inference_mode():
        expected, _ = rope_freqs(q, None, freqs)
    out, _ = rope_freqs(q, None, freqs)
    out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    q, freqs = torch.randn(9, 2, 1, 16), angles(9, 16)
    grads = []
    for run_it in (
        lambda f, *args: f(*args),
        lambda f, *args: checkpoint(f, *args, use_reentrant=use_reentrant),
    ):
        leaf = q.clone().requires_grad_()
        hidden = leaf
        for _ in range(3):
            hidden = run_it(lambda x, f: rope_freqs(x.sin(), None, f)[0], hidden, freqs)
        hidden.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
