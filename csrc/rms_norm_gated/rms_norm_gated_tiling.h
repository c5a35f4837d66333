// Constants and the tiling that host and device share in rms_norm_gated, forward and backward.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

struct RmsNormGatedTiling {
  RowsTiling rows;
  // grad, grad_z: only in backward, where out is the gradient of x. weight has one row per group.
  RowTensor grad, x, weight, z, out, grad_z;
  float eps;
  int32_t norm_before_gate, silu;
};

// Bytes of the unified buffer, as in l2norm_tiling.h. FixedBytes include rows of weight. In
// backward, rms_norm_gated_npu.cpp adds the bytes for the sums of weight's gradient, a whole row.
constexpr int64_t kRmsNormGatedFloats = 4, kRmsNormGatedBackwardFloats = 8;
constexpr int64_t kRmsNormGatedRowBytes = 4 * (2 * 64 + 8 + 4);
constexpr int64_t kRmsNormGatedFixedBytes = 4 * 64 + 2 * 4 * kWidestChunk + 4 * kWidestChunk;
// In elements. With wider rows, the sums of the weight's gradient leave no room for tiles.
constexpr int64_t kWidestWeight = 16384;

}  // namespace npu_ops
