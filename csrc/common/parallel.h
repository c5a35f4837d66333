// Runs loops in parallel on torch's own thread pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/torch.h"

namespace npu_ops {

// With fewer elements than this, a second thread costs more than it gains.
constexpr int64_t kGrainElements = 32768;

// Runs body(begin, end) over [0, count) in parallel; an item has `width` elements.
template <class Body>
void parallel(int64_t count, int64_t width, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width));
  parallel_for(0, count, grain, body);
}

}  // namespace npu_ops
