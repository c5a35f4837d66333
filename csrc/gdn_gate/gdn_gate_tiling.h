// Constants and the tiling that host and device share in gdn_gate, forward and backward.
#pragma once

#include "common/rows_tiling.h"

namespace npu_ops {

struct GdnGateTiling {
  RowsTiling rows;
  // Forward writes g and beta. Backward reads the gradients of both, in g and beta, and writes
  // those of a and b. A_log and dt_bias have one row.
  RowTensor a, A_log, dt_bias, b, g, beta, grad_a, grad_b;
  float scale;
};

// Bytes of the unified buffer, as in l2norm_tiling.h. Tiles of a and b share a queue; in backward,
// the gradients of g and beta share another. A queue is double-buffered: it holds two fp32 tiles.
// kGdnGateFixedBytes counts the rows of A_log and dt_bias. In backward, gdn_gate_npu.cpp adds the
// bytes of two more rows: the sums of the gradients of A_log and dt_bias.
constexpr int64_t kGdnGateQueueBytes = 2 * 4;
constexpr int64_t kGdnGateFloats = 6, kGdnGateBackwardFloats = 7;
constexpr int64_t kGdnGateFixedBytes = 2 * 3 * 4 * kWidestChunk;

}  // namespace npu_ops
