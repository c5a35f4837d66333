// Sums along a row. The compiler may not reorder float additions, so the lanes are spelled out.
#pragma once

#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

constexpr int64_t kSumLanes = 32;

// The sum of term(i) for i in [0, width): the same for the same width on every machine, but for
// fused multiply-adds.
template <class Term>
NPU_OPS_INLINE float sum(int64_t width, const Term& term) {
  float lanes[kSumLanes] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= width; i += kSumLanes)
    for (int64_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += term(i + lane);
  for (int64_t lane = 0; i < width; ++i, ++lane) lanes[lane] += term(i);
  for (int64_t half = kSumLanes / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace npu_ops
