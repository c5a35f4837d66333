// What host and device share of rope and mrope.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

constexpr int32_t kMostPairs = 128;

// Elements from one batch, token or head of q or k to the next.
struct Heads {
  int64_t batch, token, head;
  int32_t count;
};

// Elements from one axis (T, H, W), batch or row of a table to the next; of positions, a token.
struct Table {
  int64_t axis, batch, row;
};

struct RotaryTiling {
  RowsTiling rows;  // a group is a token, a row a head: those of q, then those of k
  Heads q, k, q_out, k_out;
  Table cos, sin, positions;
  int64_t length, table_rows;
  int32_t type, table_type, wide_positions;  // ElementType; whether positions are 64 bits wide
  int32_t rotary_dim, table_width, axes, interleaved, inverse;
  uint8_t axis_of_pair[kMostPairs];
};

// Bytes of the unified buffer, as in l2norm_tiling.h: two tiles of floats and one of offsets.
// Besides rows of a table, two of each for three axes as they are read, and coefficients, signs and
// offsets.
constexpr int64_t kRotaryElementBytes = 3 * 4;
constexpr int64_t kRotaryFixedBytes = (2 * 2 * 3 + 2 * 3 + 6) * 4 * 2 * kMostPairs;

}  // namespace npu_ops
