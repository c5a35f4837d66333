// Constants and the tiling that host and device share in l2norm, forward and backward.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

struct L2NormTiling {
  RowsTiling rows;
  RowTensor grad, x, out;  // grad: of backward alone; there out is the gradient of x
  float eps;
};

// Unified buffer in addition to two tiles of each tensor: tiles of fp32 (Floats); bytes of a row
// (two partial sums of 64 floats, eight floats to spread a factor, four floats); and fixed bytes.
constexpr int64_t kL2NormFloats = 2, kL2NormBackwardFloats = 3;
constexpr int64_t kL2NormRowBytes = 4 * (2 * 64 + 8 + 4), kL2NormFixedBytes = 4 * 64;

}  // namespace npu_ops
