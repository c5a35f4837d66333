// Small matrix products in registers, for operands that a core's caches hold.
#pragma once

#include <cstdint>

#include "common/lanes.h"

namespace npu_ops {

// Rows of a product that are computed at once. With more, AVX2 and NEON run out of registers; with
// fewer, sums wait for each other.
constexpr int kRows = 6;

// A matrix with a row stride and a column stride; exchanging them transposes it.
struct Left {
  const float* data;
  int64_t row, column;
};

// A matrix whose rows begin `step` elements apart and are padded to a multiple of kLanes.
template <class Float>
struct Padded {
  Float* row(int64_t index) const { return data + index * step; }
  Padded from(int64_t index) const { return {row(index), step}; }
  operator Padded<const Float>() const { return {data, step}; }
  Float* data;
  int64_t step;
};

// Sets ROWS rows of `to`, in the first `columns` columns, to left * right; with ADDS, adds the
// product to them. depth: the columns of left. columns: a multiple of kLanes.
template <int ROWS, bool ADDS = false>
NPU_OPS_INLINE void multiply(Left left, Padded<const float> right, int64_t depth, Padded<float> to,
                             int64_t columns) {
  for (int64_t at = 0; at < columns; at += kLanes) {
    Lanes sums[ROWS][kParts] = {};
    for (int i = 0; i < ROWS && ADDS; ++i)
      for (int part = 0; part < kParts; ++part)
        sums[i][part] = lanes(to.row(i) + at + part * kFloats);
    const float *l = left.data, *r = right.data + at;
    for (int64_t k = 0; k < depth; ++k, l += left.column, r += right.step)
      for (int i = 0; i < ROWS; ++i)
        for (int part = 0; part < kParts; ++part)
          sums[i][part] += l[i * left.row] * lanes(r + part * kFloats);
    for (int i = 0; i < ROWS; ++i)
      for (int part = 0; part < kParts; ++part)
        lanes(to.row(i) + at + part * kFloats) = sums[i][part];
  }
}

// Sets to[i, j] to `by` times the dot product of row i of left and row j of right, for ROWS rows i
// and `count` rows j.
template <int ROWS>
NPU_OPS_INLINE void multiply_rows(Padded<const float> left, Padded<const float> right,
                                  int64_t count, float by, Padded<float> to) {
  for (int64_t j = 0; j < count; ++j) {
    Lanes sums[ROWS][kParts] = {};
    for (int64_t at = 0; at < right.step; at += kLanes)
      for (int i = 0; i < ROWS; ++i)
        for (int part = 0; part < kParts; ++part)
          sums[i][part] +=
              lanes(left.row(i) + at + part * kFloats) * lanes(right.row(j) + at + part * kFloats);
    for (int i = 0; i < ROWS; ++i) to.row(i)[j] = by * sum_of(sums[i]);
  }
}

}  // namespace npu_ops
