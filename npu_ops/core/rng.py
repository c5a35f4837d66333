"""Counter-based random numbers for dropout: Philox4x32-10 and its keep mask.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A mask depends only
on (seed, offset, row, column, width). So a backward pass or a recomputation draws the mask again
instead of saving it, and every implementation draws the same bits.
"""

from __future__ import annotations

import torch

from npu_ops.core import make

LANES = 8  # elements served by one Philox call, 16 bits each


def new_state(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Draw (seed, offset), int64 [2], from `generator` or the device's default one, advancing it.

    The state stays on the device, so nothing waits for it. Code that restores the generator
    (activation checkpointing, fork_rng) thereby restores the mask.
    """
    most = 2**63 - 1
    return torch.randint(most, (2,), dtype=torch.int64, device=device, generator=generator)


def threshold(p: float) -> int:
    """Return the least 16-bit draw that keeps an element: p * 65536, rounded, from 1 to 65535."""
    return min(max(round(p * 65536), 1), 65535)


def scale(p: float) -> float:
    """Return the factor for kept elements: 1 over the probability that `threshold(p)` keeps one.

    `threshold` rounds p. Dividing by the rounded probability keeps the expectation exact.
    """
    return 65536 / (65536 - threshold(p))


def lane_width(width: int) -> int:
    """Return the columns per lane if a row of `width` is cut into 8 lanes; a multiple of 16."""
    return -(-width // (LANES * 16)) * 16


def keep_mask(rows: int, width: int, p: float, state: torch.Tensor) -> torch.Tensor:
    """Return the elements of a [rows, width] tensor that dropout keeps, as bool.

    Column c of row r takes the 16-bit draw number c // G of Philox(counter=(c % G, r, offset),
    key=seed), with G = lane_width(width).
    """
    lane = lane_width(width)
    seed, offset = state.unbind()
    column = make.counted(lane, device=state.device).expand(rows, lane)
    row = make.counted(rows, device=state.device)[:, None].expand(rows, lane)
    counter = (column, row, _low(offset), _high(offset))
    words = philox4x32(counter, (_low(seed), _high(seed)))
    draws = torch.cat([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    return draws[:, :width] >= threshold(p)


def philox4x32(counter, key, rounds: int = 10) -> tuple[torch.Tensor, ...]:
    """Philox4x32: map a 4-word counter and a 2-word key to four 32-bit words, as int64 tensors."""
    words = (*counter, *key)
    device = next((word.device for word in words if isinstance(word, torch.Tensor)), "cpu")
    c0, c1, c2, c3, k0, k1 = (
        torch.as_tensor(word, dtype=torch.int64, device=device) for word in words
    )
    for _ in range(rounds):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of a * b; uses 16-bit limbs, as a * b may overflow int64."""
    low = a * (b & 0xFFFF)
    middle = a * (b >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _low(word: torch.Tensor) -> torch.Tensor:
    return word & 0xFFFFFFFF


def _high(word: torch.Tensor) -> torch.Tensor:
    return (word >> 32) & 0xFFFFFFFF
