// Sums over rows that do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace npu_ops {

// Rows are summed in a fixed number of blocks, whatever the number of threads, so that the sums are
// the same on every machine.
constexpr int64_t kBlocks = 64;

struct Partials {
  Partials(int64_t rows, int64_t width, bool wanted)
      : width(width),
        block_rows(std::max<int64_t>(1, (rows + kBlocks - 1) / kBlocks)),
        blocks((rows + block_rows - 1) / block_rows),
        sums(wanted ? blocks * width : 0, 0.0f) {}

  float* block(int64_t index) { return sums.empty() ? nullptr : sums.data() + index * width; }

  void total(float* out) const {
    std::fill(out, out + width, 0.0f);
    for (int64_t index = 0; index < blocks; ++index)
      for (int64_t i = 0; i < width; ++i) out[i] += sums[index * width + i];
  }

  int64_t width, block_rows, blocks;
  std::vector<float> sums;
};

}  // namespace npu_ops
