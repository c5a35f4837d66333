"""Shared by fused_recurrent_gated_delta_rule and gated_delta_rule_update: handles tiles of states.

A tile is BK keys by BV values; with V_FIRST it is BV values by BK keys, like the state in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import next_power_of_2


@triton.jit
def keys_of(x, V_FIRST: tl.constexpr):
    """Return a vector of keys as a tile that broadcasts over values."""
    if V_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def values_of(x, V_FIRST: tl.constexpr):
    """Return a vector of values as a tile that broadcasts over keys."""
    if V_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def over_keys(x, V_FIRST: tl.constexpr):
    """Return the sum over the keys of a state tile."""
    if V_FIRST:
        return tl.sum(x, 1)
    else:
        return tl.sum(x, 0)


@triton.jit
def over_values(x, V_FIRST: tl.constexpr):
    """Return the sum over the values of a state tile."""
    if V_FIRST:
        return tl.sum(x, 0)
    else:
        return tl.sum(x, 1)


@triton.jit
def state_tile(key, value, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Return the offsets of a tile within its state, and which elements exist."""
    key, value = keys_of(key, V_FIRST), values_of(value, V_FIRST)
    exists = (key < K) & (value < V)
    if V_FIRST:
        return value * K + key, exists
    else:
        return key * V + value, exists


@triton.jit
def columns_of(item, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Decode the index of a work item: BV columns of one head's state.

    Returns the sequence, the head, the columns, and the columns' `state_tile`.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    value = item % blocks * BV + tl.arange(0, BV)
    at, exists = state_tile(tl.arange(0, BK), value, K, V, V_FIRST)
    return item // (HV * blocks), item // blocks % HV, value, at, exists


@triton.jit
def load_row(x, row, at, WIDTH: tl.constexpr):
    """Load part of a row of [rows, WIDTH] in fp32, 0 beyond its end."""
    return tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def within(begin, end, tokens):
    """Clamp begin and end so that 0 <= begin <= end <= tokens."""
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    return begin, tl.minimum(tl.maximum(end, begin), tokens)


def tile_constants(keys: int, values: int, tile: int) -> dict:
    """Return the constants of a tile of up to `tile` elements: all keys, and values that fit."""
    rows = next_power_of_2(keys)
    return {"BK": rows, "BV": min(next_power_of_2(values), tile // rows)}
