// What host and device share of rope, mrope and qk_norm_rope.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

constexpr int32_t kMostPairs = 128;

// Heads of one kind in a tensor of tokens: elements before the first of them, and from one batch,
// token or head to the next.
struct HeadTensor {
  int64_t first, batch, token, head;
  int32_t count;

  // Where those of a token begin; `length` tokens are a batch.
  NPU_OPS_SHARED int64_t at(int64_t index, int64_t length) const {
    return first + index / length * batch + index % length * token;
  }
};

// The row of a token that belongs to no sequence, whose result is 0 (npu_ops/ops/rope/packing.py).
constexpr int64_t kNobody = -(1 << 30);

// Elements from one axis (T, H, W), batch or row of a table to the next; of positions, a token.
struct Table {
  int64_t axis, batch, row;
};

// How tokens are rotated.
struct AnglesTiling {
  Table cos, sin, positions;
  int64_t length, table_rows;
  int32_t table_type, wide_positions;  // ElementType; whether positions are 64 bits wide
  int32_t rotary_dim, table_width, axes, interleaved, inverse;
  uint8_t axis_of_pair[kMostPairs];
};

struct RotaryTiling {
  RowsTiling rows;  // a group is a token, a row a head: those of q, then those of k
  AnglesTiling angles;
  HeadTensor q, k, q_out, k_out;
  int32_t type;  // ElementType
};

// Bytes of the unified buffer that angles take, as in l2norm_tiling.h: a tile of offsets. Besides
// rows of a table, two of each for three axes as they are read, and coefficients, signs and
// offsets.
constexpr int64_t kAnglesElementBytes = 4;
constexpr int64_t kAnglesFixedBytes = (2 * 2 * 3 + 2 * 3 + 6) * 4 * 2 * kMostPairs;
// rope and mrope have two tiles of floats, too.
constexpr int64_t kRotaryElementBytes = 2 * 4 + kAnglesElementBytes;

}  // namespace npu_ops
