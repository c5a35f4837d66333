// Sums over rows that do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "common/parallel.h"
#include "common/vec.h"

namespace npu_ops {

// Rows are summed in blocks that are the same whatever the number of threads, so that the sums are
// the same on every machine: 64, or as few as are worth a thread each. Their sums go to one thread
// in the end, so beyond four, a block has enough rows for that to be little.
constexpr int64_t kBlocks = 64, kFewBlocks = 4, kRowsOfSums = 32;

struct Partials {
  // cost: of a row, in elements, as `parallel` takes it.
  Partials(int64_t rows, int64_t width, int64_t cost, bool wanted = true)
      : width(width),
        block_rows(std::max({int64_t{1}, (rows + kBlocks - 1) / kBlocks, kGrainElements / cost,
                             std::min(kRowsOfSums * width / cost, rows / kFewBlocks)})),
        block_cost(block_rows * cost),
        blocks((rows + block_rows - 1) / block_rows),
        sums(wanted ? new float[blocks * width] : nullptr) {}

  // A block's sums, zeros. For the thread that adds to them: memory that another has written takes
  // as long to come as a row to be summed.
  float* start(int64_t index) {
    if (!sums) return nullptr;
    float* block = sums.get() + index * width;
    std::fill_n(block, width, 0.0f);
    return block;
  }

  void total(float* out) const {
    // An eighth: adding costs so little next to what `cost` counts.
    parallel(width, blocks / 8, [&](int64_t begin, int64_t end) {
      std::fill(out + begin, out + end, 0.0f);
      for (int64_t index = 0; index < blocks; ++index)
        add(sums.get() + index * width + begin, out + begin, end - begin);
    });
  }

  int64_t width, block_rows, block_cost, blocks;
  std::unique_ptr<float[]> sums;

 private:
  NPU_OPS_CLONES static void add(const float* in, float* out, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] += in[i];
  }
};

}  // namespace npu_ops
