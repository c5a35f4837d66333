// Sums over rows that do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "common/vec.h"

namespace npu_ops {

// Rows are summed in blocks. The number of blocks depends on the shape alone, so sums do not depend
// on the number of threads. There are up to 64 blocks, because shorter sums round less. One thread
// adds the blocks' sums at the end. To keep this addition cheap, there are more than about four
// blocks only if each has at least kRowsOfSums * width / cost rows.
constexpr int64_t kBlocks = 64, kFewBlocks = 4, kRowsOfSums = 32;

struct Partials {
  // cost: work per row in elements, like `width` of `parallel`.
  Partials(int64_t rows, int64_t width, int64_t cost)
      : rows(rows),
        width(width),
        block_rows(std::max({int64_t{1}, (rows + kBlocks - 1) / kBlocks,
                             std::min(kRowsOfSums * width / cost, rows / kFewBlocks)})),
        block_cost(block_rows * cost),
        blocks((rows + block_rows - 1) / block_rows),
        sums(blocks * width, 0.0f) {}

  // Runs body(begin, end, sums) for each block of rows, in parallel.
  template <class Body>
  void each_block(const Body& body) {
    parallel(blocks, block_cost, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block)
        body(block * block_rows, std::min(rows, (block + 1) * block_rows),
             sums.data() + block * width);
    });
  }

  void total(float* out) const {
    std::fill(out, out + width, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) add(sums.data() + block * width, out, width);
  }

  int64_t rows, width, block_rows, block_cost, blocks;
  std::vector<float> sums;

 private:
  NPU_OPS_CLONES static void add(const float* in, float* out, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] += in[i];
  }
};

}  // namespace npu_ops
