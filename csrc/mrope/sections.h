// The frequencies of each axis (temporal, height, width), for mrope and qk_norm_rope.
#pragma once

#include <vector>

#include "rope/rotate.h"

namespace npu_ops {

// Returns the frequencies of axes T, H and W, which callers apply in this order. If sections are
// interleaved, T has all frequencies. Then H overrides frequencies 1, 4, ... below 3 h, and W
// overrides 2, 5, ... below 3 w.
inline std::vector<Span> owned(const std::vector<int64_t>& section, bool interleaved,
                               int64_t pairs) {
  const int64_t t = section[0], h = section[1], w = section[2];
  if (interleaved) return {{0, pairs, 1}, {1, 3 * h, 3}, {2, 3 * w, 3}};
  return {{0, t, 1}, {t, t + h, 1}, {t + h, t + h + w, 1}};
}

}  // namespace npu_ops
