// How AscendC kernels cut rows into tiles; host and device share this file.
//
// A tensor has `groups` groups of `rows` rows of `width` columns. A piece of work is `piece_rows`
// rows of one group; each of n launched blocks takes every n-th piece. A tile is `tile_rows` rows
// of a piece by `chunk` columns.
#pragma once

#include "common/ascendc_types.h"

namespace npu_ops {

// The strides of a tensor's rows, in elements. Columns are contiguous.
struct RowTensor {
  int64_t group, outer, inner;
  int32_t type;  // ElementType
};

struct RowsTiling {
  int64_t rows, inner;  // rows per group, and per outer index
  int64_t piece_rows;
  int32_t groups, width, chunk, tile_rows;
  int32_t stride;    // between rows of a tile: chunk, rounded up to a multiple of 16
  int32_t elements;  // per tile: tile_rows * stride

  NPU_OPS_SHARED int32_t chunks() const { return (width + chunk - 1) / chunk; }
  // The elements of a row, rounded up to whole chunks of `stride` elements.
  NPU_OPS_SHARED int32_t whole_row() const { return chunks() * stride; }
  NPU_OPS_SHARED int64_t pieces_of_group() const { return (rows + piece_rows - 1) / piece_rows; }
  NPU_OPS_SHARED int64_t pieces() const { return groups * pieces_of_group(); }
};

// A vector instruction repeats at most 255 times, and its rows are at most 255 blocks of 32 bytes
// apart.
constexpr int64_t kWidestChunk = 2032, kMostRows = 248;

// Computes the sizes of pieces and tiles. `element_bytes`, `row_bytes`, `fixed_bytes`: bytes of the
// unified buffer per element of a tile, per row of a tile, and for everything else. A group is cut
// into at most ceil(cores / groups) pieces.
inline void cut_rows(RowsTiling& tiling, int64_t cores, int64_t ub_bytes, int64_t element_bytes,
                     int64_t row_bytes, int64_t fixed_bytes) {
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const auto over = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t room = ub_bytes - kReservedBytes - fixed_bytes;
  const int64_t widest = least(kWidestChunk, (room - row_bytes) / element_bytes / 16 * 16);
  // Chunks have equal size, so that the last is not much smaller.
  const int64_t chunks = over(tiling.width, widest);
  const int64_t stride = over(over(tiling.width, chunks), 16) * 16;
  tiling.stride = static_cast<int32_t>(stride);
  tiling.chunk = static_cast<int32_t>(least(stride, tiling.width));
  const int64_t share = over(tiling.rows, most(1, over(cores, tiling.groups)));
  tiling.piece_rows = most(1, share);
  const int64_t fit = room / (element_bytes * stride + row_bytes);
  tiling.tile_rows = static_cast<int32_t>(most(1, least(least(fit, kMostRows), share)));
  tiling.elements = static_cast<int32_t>(tiling.tile_rows * stride);
}

}  // namespace npu_ops
