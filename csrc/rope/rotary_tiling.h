// Constants and the tiling that host and device share in rope, mrope and qk_norm_rope.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

constexpr int32_t kMostPairs = 128;

// Heads of one kind in a tensor of tokens: the elements before the first head, and the strides of
// batch, token and head.
struct HeadTensor {
  int64_t first, batch, token, head;
  int32_t count;

  // Returns the offset of the first head of token `index`. `length`: tokens per batch element.
  NPU_OPS_SHARED int64_t at(int64_t index, int64_t length) const {
    return first + index / length * batch + index % length * token;
  }
};

// The table row of a token that belongs to no sequence. The token's result is 0
// (npu_ops/ops/rope/packing.py).
constexpr int64_t kNobody = -(1 << 30);

// The strides of axis (T, H, W), batch and row of a table, in elements. For positions, `row` is the
// stride of a token.
struct Table {
  int64_t axis, batch, row;
};

// The tables, positions and pair layout of a rotation.
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

// Bytes of the unified buffer for angles. Each element of a tile has an offset for Gather. The
// fixed bytes are table rows of three axes, coefficients, signs and offsets.
constexpr int64_t kAnglesElementBytes = 4;
constexpr int64_t kAnglesFixedBytes = (2 * 2 * 3 + 2 * 3 + 6) * 4 * 2 * kMostPairs;
// rope and mrope also have two tiles of floats.
constexpr int64_t kRotaryElementBytes = 2 * 4 + kAnglesElementBytes;

}  // namespace npu_ops
