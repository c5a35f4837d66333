// Products of two rows, summed in vectors that are spelled out: of the lanes of `sum` the compiler
// clears and reduces an array in memory, which takes as long as the products of a short row.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/sum.h"

namespace npu_ops {

using Eight = float __attribute__((vector_size(32), aligned(2), may_alias));
using EightWords = uint32_t __attribute__((vector_size(32), aligned(2), may_alias));

// Sixteen elements: floats in their order; of bf16 those at even places, then those at odd ones, so
// that none has to be moved.
struct Sixteen {
  NPU_OPS_INLINE explicit Sixteen(const float* at)
      : first(*reinterpret_cast<const Eight*>(at)),
        second(*reinterpret_cast<const Eight*>(at + 8)) {}
  NPU_OPS_INLINE explicit Sixteen(const bf16* at) {
    const EightWords words = *reinterpret_cast<const EightWords*>(at);
    first = reinterpret_cast<Eight>(words << 16);
    second = reinterpret_cast<Eight>(words & 0xffff0000u);
  }
  Eight first, second;
};

// As `sum` adds its last eight lanes.
NPU_OPS_INLINE float sum_of(const Eight& x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// The sum of a[i] * b[i] for i in [0, width), to the bit what `sum` has.
template <class A, class B>
NPU_OPS_INLINE float dot(const A* a, const B* b, int64_t width) {
  constexpr bool alike = std::is_same_v<A, B> && !std::is_same_v<A, fp16>;
  if constexpr (alike && kFloats == 8) {
    if (width % kSumLanes == 0) {
      Eight lanes[4] = {};
      for (int64_t i = 0; i < width; i += kSumLanes)
        for (int64_t half = 0; half < 2; ++half) {
          const Sixteen x(a + i + 16 * half), y(b + i + 16 * half);
          lanes[2 * half] += x.first * y.first;
          lanes[2 * half + 1] += x.second * y.second;
        }
      lanes[0] += lanes[2], lanes[1] += lanes[3];
      if constexpr (std::is_same_v<A, float>) return sum_of(lanes[0] + lanes[1]);
      return sum_of(lanes[0]) + sum_of(lanes[1]);
    }
  }
  return sum(width, [&](int64_t i) { return load(a[i]) * load(b[i]); });
}

template <class X>
NPU_OPS_INLINE float reciprocal_rms(const X* x, int64_t width, float eps) {
  return 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

}  // namespace npu_ops
