"""Shared by chunk_gated_delta_rule and chunk_kda: chooses tile sizes and the division of states.

States are divided among the programs of a launch.
"""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv, next_power_of_2
from npu_ops.core.room import Room

# Bytes of state on each vector core that shares a tile. The core's unified buffer must hold the
# fp32 state, the tile that is added to it, and a chunk's rows.
STATE_BYTES = 32 * 1024
# Minimum number of state columns per program, even if cores stay idle. Fewer columns do not make a
# chunk's step faster: the step waits for hand-overs between matrix unit and vector cores
# (docs/npu-model.md).
FEWEST_COLUMNS = 32
# Average number of chunks per sequence from which a second launch pays off.
LONG = 8
# Number of vector cores that share a tile -> shortest side of a matrix product's factor. On
# Ascend950, with one core per tile, a side of 16 fails an assertion in the compiler.
NARROWEST = {1: 32, 2: 16}
ROOM = Room("chunk_gated_delta_rule")


def chunk_size_of(q, v, size: int) -> int:
    """Return the number of tokens in a chunk.

    Rows of more than 128 elements leave room for only 32 tokens if products are fp32. The same
    holds for bf16 with an older compiler, which needs more memory. The chunk size changes results
    only by rounding.
    """
    wide = (q.dtype != torch.bfloat16 or ROOM.halvings) and max(q.shape[3], v.shape[3]) > 128
    return max(narrowest(q.device), min(size, 32) if wide else size)


@dataclasses.dataclass(frozen=True)
class Walk:
    """One launch of a kernel that loops over the chunks of sequences.

    piece, end: the work items piece to end - 1. A work item is one head's state of one sequence, or
    BV of its columns; BV is in `constants`.
    """

    piece: int
    end: int
    grid: tuple[int]
    constants: dict


def walks_of(q, v, sequences: int, state_v_first: bool, size: int) -> list[Walk]:
    """Plan the launches that update the states of all heads over their sequences.

    If heads would leave cores idle, their states are split into blocks of columns. This happens if
    there are few heads, and for the last heads if they do not fill all cores.
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
    """Return the compile-time constants that all launches (see `Walk`) share."""
    return {
        "H": q.shape[2], "HV": v.shape[2], "K": q.shape[3], "V": v.shape[3],
        "V_FIRST": state_v_first, "BK": width_of(q.shape[3], q.device), "C": size,
    }  # fmt: skip


def most_columns(q, v) -> int:
    """Return the maximum number of columns of a state that fit on chip."""
    room = ROOM.of(STATE_BYTES) * hardware.cores_of_a_tile(q.device)
    fits = room // (4 if q.dtype == torch.bfloat16 else 8) // width_of(q.shape[3], q.device)
    return min(width_of(v.shape[3], v.device), fits)


def columns_of(v, heads: int, most: int) -> int:
    """Return the state columns per program: few enough to use all cores, at most `most`."""
    cores = hardware.num_cube_cores(v.device)
    while most > FEWEST_COLUMNS and heads * cdiv(v.shape[3], most // 2) <= cores:
        most //= 2
    return most


def width_of(elements: int, device) -> int:
    """Return the width of a tile for rows of `elements` elements: a power of 2."""
    return max(narrowest(device), next_power_of_2(elements))


def narrowest(device) -> int:
    return NARROWEST[hardware.cores_of_a_tile(device)]


def cube_grid(items: int, device) -> tuple[int]:
    return (min(items, hardware.num_cube_cores(device)),)
