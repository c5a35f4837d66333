"""Shared by chunk_gated_delta_rule and chunk_kda: the size of tiles, and which program has which
state."""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv, next_power_of_2
from npu_ops.core.room import Room

# Bytes on each vector core that shares a tile. The core's unified buffer holds the state in fp32
# and the tile that is added to it, beside a chunk's rows.
STATE_BYTES = 32 * 1024
# The fewest columns of a state in a program, even if cores stay idle: with fewer, a step still
# waits as long (docs/npu-model.md).
FEWEST_COLUMNS = 32
# With so many chunks per sequence, on average, a second launch pays off.
LONG = 8
# The shortest side of a factor of a product, by the number of vector cores that share it. On
# Ascend950, which has one, the compiler stops at an assertion of its own if a side is 16.
NARROWEST = {1: 32, 2: 16}
ROOM = Room("chunk_gated_delta_rule")


def chunk_size_of(q, v, size: int) -> int:
    """Return the number of tokens in a chunk.

    Rows of more than 128 fp32 leave room for 32 tokens; so do bf16 rows with an older compiler that
    keeps more beside them. The result is the same.
    """
    wide = (q.dtype != torch.bfloat16 or ROOM.halvings) and max(q.shape[3], v.shape[3]) > 128
    return max(narrowest(q.device), min(size, 32) if wide else size)


@dataclasses.dataclass(frozen=True)
class Walk:
    """One launch of the kernel that goes through sequences chunk by chunk.

    piece, end: its first work item, and the one behind its last. A work item is one head's state of
    one sequence, or BV of its columns; BV is in `constants`.
    """

    piece: int
    end: int
    grid: tuple[int]
    constants: dict


def walks_of(q, v, sequences: int, state_v_first: bool, size: int) -> list[Walk]:
    """Plan the launches that walk all heads through their sequences.

    If heads would leave cores idle, they are split into columns: when there are few heads, and for
    the heads that remain for a last round.
    """
    constants = constants_of(q, v, state_v_first, size)

    def walk(first: int, end: int, columns: int) -> Walk:
        blocks = cdiv(v.shape[3], columns)
        grid = cube_grid((end - first) * blocks, v.device)
        return Walk(first * blocks, end * blocks, grid, constants | {"BV": columns})

    most, heads = most_columns(q, v), sequences * v.shape[2]
    blocks, cores = cdiv(v.shape[3], most), hardware.num_cube_cores(v.device)
    last = heads - heads * blocks // cores * cores // blocks
    columns = columns_of(v, last, most) if last else most
    if columns == most or last == heads or q.shape[0] * q.shape[1] < LONG * sequences * size:
        return [walk(0, heads, columns_of(v, heads, most))]
    return [walk(0, heads - last, most), walk(heads - last, heads, columns)]


def constants_of(q, v, state_v_first: bool, size: int) -> dict:
    """Return the compile-time constants that all walks share."""
    return {
        "H": q.shape[2], "HV": v.shape[2], "K": q.shape[3], "V": v.shape[3],
        "V_FIRST": state_v_first, "BK": width_of(q.shape[3], q.device), "C": size,
    }  # fmt: skip


def most_columns(q, v) -> int:
    """Return the number of columns of a state that fit on chip."""
    room = ROOM.of(STATE_BYTES) * hardware.cores_of_a_tile(q.device)
    fits = room // (4 if q.dtype == torch.bfloat16 else 8) // width_of(q.shape[3], q.device)
    return min(width_of(v.shape[3], v.device), fits)


def columns_of(v, heads: int, most: int) -> int:
    """Return a program's columns of a state: few enough to use all cores, at most `most`."""
    cores = hardware.num_cube_cores(v.device)
    while most > FEWEST_COLUMNS and heads * cdiv(v.shape[3], most // 2) <= cores:
        most //= 2
    return most


def width_of(elements: int, device) -> int:
    """Return the width of a tile that holds so many elements in a row."""
    return max(narrowest(device), next_power_of_2(elements))


def narrowest(device) -> int:
    return NARROWEST[hardware.cores_of_a_tile(device)]


def cube_grid(items: int, device) -> tuple[int]:
    return (min(items, hardware.num_cube_cores(device)),)
