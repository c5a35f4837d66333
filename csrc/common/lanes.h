// Vectors with explicit lanes, for sums: the compiler may not reorder float additions, so it cannot
// vectorise a plain loop.
#pragma once

#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

using Lanes = float __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));
constexpr int64_t kLanes = 16;  // rows are padded to a multiple of this
constexpr int kParts = kLanes / kFloats;

NPU_OPS_INLINE const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }
NPU_OPS_INLINE Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Adds the lanes in the order of `sum` in sum.h: one half to the other, until one lane is left.
NPU_OPS_INLINE float sum_of(const Lanes& x) {
  if constexpr (kFloats == 8)
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  else
    return (x[0] + x[2]) + (x[1] + x[3]);
}

template <int N>
NPU_OPS_INLINE float sum_of(const Lanes (&parts)[N]) {
  if constexpr (N == 1)
    return sum_of(parts[0]);
  else {
    Lanes halves[N / 2];
    for (int i = 0; i < N / 2; ++i) halves[i] = parts[i] + parts[i + N / 2];
    return sum_of(halves);
  }
}

}  // namespace npu_ops
