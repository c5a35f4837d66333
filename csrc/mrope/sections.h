// Which frequencies an axis owns, for mrope and qk_norm_rope.
#pragma once

#include <vector>

#include "rope/rotate.h"

namespace npu_ops {

// The frequencies that axes T, H and W own. Interleaved, T is given all of them, and H and W then
// take every third of theirs back.
inline std::vector<Span> owned(const std::vector<int64_t>& section, bool interleaved,
                               int64_t pairs) {
  const int64_t t = section[0], h = section[1], w = section[2];
  if (interleaved) return {{0, pairs, 1}, {1, 3 * h, 3}, {2, 3 * w, 3}};
  return {{0, t, 1}, {t, t + h, 1}, {t + h, t + h + w, 1}};
}

}  // namespace npu_ops
