// Constants and the tiling that host and device share in l2norm, forward and backward.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

struct L2NormTiling {
  RowsTiling rows;
  RowTensor grad, x, out;  // grad: only in backward, where out is the gradient of x
  float eps;
};

// Contents of the unified buffer, besides two tiles of each tensor:
// - Floats: the number of fp32 tiles.
// - RowBytes: bytes per row of a tile, for two partial sums of 64 floats, eight floats to broadcast
//   a factor, and four floats.
// - FixedBytes: bytes that do not depend on the tile.
constexpr int64_t kL2NormFloats = 2, kL2NormBackwardFloats = 3;
constexpr int64_t kL2NormRowBytes = 4 * (2 * 64 + 8 + 4), kL2NormFixedBytes = 4 * 64;

}  // namespace npu_ops
