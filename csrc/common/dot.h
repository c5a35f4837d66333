// Products of two rows, summed in vectors that are spelled out: of the lanes of `sum` the compiler
// clears and reduces an array in memory, which takes as long as the products of a short row.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/lanes.h"
#include "common/sum.h"

namespace npu_ops {

using Words = uint32_t __attribute__((vector_size(4 * kFloats), aligned(2), may_alias));

NPU_OPS_INLINE float dot_in_lanes(const float* a, const float* b, int64_t width) {
  Lanes sums[kSumLanes / kFloats] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= width; i += kSumLanes)
    for (int64_t j = 0; j < kSumLanes; j += kFloats)
      sums[j / kFloats] += lanes(a + i + j) * lanes(b + i + j);
  for (int64_t j = 0; j < kLanes && i < width; j += kFloats)  // half as many are left
    sums[j / kFloats] += lanes(a + i + j) * lanes(b + i + j);
  return sum_of(sums);
}

// A word has two elements: those at even places are summed apart from those at odd ones, so that
// none has to be moved.
NPU_OPS_INLINE float dot_in_lanes(const bf16* a, const bf16* b, int64_t width) {
  constexpr uint32_t kHigh = 0xffff0000u;
  Lanes even[kParts] = {}, odd[kParts] = {};
  for (int64_t i = 0; i < width; i += kSumLanes) {
    for (int64_t j = 0; j < kParts; ++j) {
      const Words x = *reinterpret_cast<const Words*>(a + i + 2 * kFloats * j);
      const Words y = *reinterpret_cast<const Words*>(b + i + 2 * kFloats * j);
      even[j] += reinterpret_cast<Lanes>(x << 16) * reinterpret_cast<Lanes>(y << 16);
      odd[j] += reinterpret_cast<Lanes>(x & kHigh) * reinterpret_cast<Lanes>(y & kHigh);
    }
  }
  return sum_of(even) + sum_of(odd);
}

// The sum of a[i] * b[i] for i in [0, width), to the bit what `sum` has.
template <class A, class B>
NPU_OPS_INLINE float dot(const A* a, const B* b, int64_t width) {
  constexpr int64_t kStep = std::is_same_v<A, float> ? kLanes : kSumLanes;
  if constexpr (std::is_same_v<A, B> && !std::is_same_v<A, fp16>)
    if (width % kStep == 0) return dot_in_lanes(a, b, width);
  return sum(width, [&](int64_t i) { return load(a[i]) * load(b[i]); });
}

template <class X>
NPU_OPS_INLINE float reciprocal_rms(const X* x, int64_t width, float eps) {
  return 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

}  // namespace npu_ops
