// Constants and the tiling that host and device share in qk_norm_rope, forward and backward.
#pragma once

#include "rope/rotary_tiling.h"

namespace npu_ops {

// The kinds of heads, in the order of a tile's rows. The first two are normalised and rotated.
constexpr int32_t kNormed = 2, kKinds = 4;  // q, k, v, gate

struct QkNormRopeTiling {
  RowsTiling rows;  // a group is a token, a row a head
  AnglesTiling angles;
  // Offset and strides of each kind of head: in the projection, in its own tensor (in backward, the
  // gradient of that tensor), and in the projection's gradient. In forward, a kind that is not
  // requested has count 0.
  HeadTensor inside[kKinds], own[kKinds], grad[kKinds];
  int32_t type, weight_type[kNormed];  // ElementType
  float eps;
  int32_t zero_centered;
};

// Bytes of the unified buffer, as in l2norm_tiling.h.
constexpr int64_t kQkNormRopeElementBytes = 2 * 4 + kAnglesElementBytes;
constexpr int64_t kQkNormRopeBackwardElementBytes = kQkNormRopeElementBytes + 2 * 4;
constexpr int64_t kQkNormRopeRowBytes = 4 * (2 * 64 + 8 + 4);
constexpr int64_t kQkNormRopeFixedBytes = kAnglesFixedBytes + 4 * 64 + 3 * 32;
// Bytes for rows as long as a head: two weights in their dtype, both in fp32, two sums.
constexpr int64_t kQkNormRopeWeightBytes = 6 * 4;

}  // namespace npu_ops
