// Functions that loops over float can be vectorised with; the C library's cannot.
#pragma once

#include <bit>
#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

// e^x for x within +-87, beyond which it is that of the end; a NaN stays a NaN. Relative error
// below 2e-7. The reduction and the polynomial are those of Cephes' expf.
NPU_OPS_INLINE float exp_within(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // its low bits are the power of two
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

}  // namespace npu_ops
