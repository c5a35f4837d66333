// Functions for loops over float that the compiler can vectorise, unlike the C library's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

// Returns e^x for x within +-87; beyond, the value at the limit; a NaN stays a NaN. Relative error
// below 2e-7. The reduction and the polynomial are those of Cephes' expf.
NPU_OPS_INLINE float exp_within(float x) {
  // One condition with a computed limit, instead of two with constant limits. For two, the compiler
  // computes the whole function on three paths and blends the results, which takes twice as long.
  x = std::fabs(x) > 87.0f ? std::copysign(87.0f, x) : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // its low bits hold the exponent
  const float power = shifted - 12582912.0f;
  const float f = x - power * 0.693359375f + power * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u;
  return (p * f * f + f + 1.0f) * std::bit_cast<float>(scale);
}

NPU_OPS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_within(-x)); }

// Returns the derivative of sigmoid. sigmoid(x) * (1 - sigmoid(x)) is inexact at large x.
NPU_OPS_INLINE float sigmoid_slope(float x) {
  const float e = exp_within(-std::fabs(x));
  return e / ((1.0f + e) * (1.0f + e));
}

// Returns log(1 + e) for e in [0, 1]: 2 artanh(s) with s = e / (2 + e) <= 1/3, by its series.
NPU_OPS_INLINE float log_1_plus(float e) {
  const float s = e / (2.0f + e), t = s * s;
  float p = 1.0f / 13;
  p = p * t + 1.0f / 11;
  p = p * t + 1.0f / 9;
  p = p * t + 1.0f / 7;
  p = p * t + 1.0f / 5;
  p = p * t + 1.0f / 3;
  p = p * t + 1.0f;
  return 2.0f * s * p;
}

// Returns log(1 + exp(x)) without overflow. For x >= 17 the result rounds to x, so torch's
// threshold of 20 is not needed.
NPU_OPS_INLINE float softplus(float x, float exp_of_minus_magnitude) {
  return (x < 0.0f ? 0.0f : x) + log_1_plus(exp_of_minus_magnitude);
}
NPU_OPS_INLINE float softplus(float x) { return softplus(x, exp_within(-std::fabs(x))); }

}  // namespace npu_ops
