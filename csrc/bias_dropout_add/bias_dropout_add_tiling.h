// The tiles of bias_dropout_add; host and device share this file.
//
// A row is cut into 8 lanes (npu_ops/core/rng.py). A tile is `tile_rows` rows by `chunk` columns of
// a lane: its four Philox words serve the same tile of all eight lanes. A piece of work is
// `piece_rows` rows of one chunk; each of n launched blocks takes every n-th piece.
#pragma once

#include "common/ascendc_types.h"

namespace npu_ops {

enum BiasKind : int32_t { kNoBias = 0, kRowBias = 1, kFullBias = 2 };

struct BiasDropoutAddTiling {
  int64_t rows, width;
  int32_t lane_width, chunk, tile_rows, piece_rows;
  int32_t elements;  // of a tile's buffers: tile_rows * chunk, rounded up to a multiple of 64
  int32_t drops, threshold;
  float scale;
  int32_t x_type, bias_type, residual_type, out_type;  // ElementType
  int32_t bias_kind;                                   // BiasKind

  NPU_OPS_SHARED int64_t chunks() const { return (lane_width + chunk - 1) / chunk; }
  NPU_OPS_SHARED int64_t row_pieces() const { return (rows + piece_rows - 1) / piece_rows; }
  NPU_OPS_SHARED int64_t pieces() const { return chunks() * row_pieces(); }
};

// Bytes of the unified buffer for each element of a tile: Philox's ten words, a column number, two
// fp32 values, and two tiles each of x, bias, residual and out.
constexpr int32_t kBytesPerElement = 4 * (10 + 1 + 2) + 2 * 4 * 4;
constexpr int32_t kSumBytesPerColumn = 8 * 4;  // of a chunk, in backward: eight lanes' sums

// Computes the sizes of tiles and pieces. `cores`: the vector cores that share the work. `sums`:
// each piece stores sums over its rows, so a piece is as large as a core's share.
inline void cut(BiasDropoutAddTiling& tiling, int32_t cores, int32_t ub_bytes, bool sums) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b * b; };
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const int64_t lane = (tiling.width + 127) / 128 * 16;
  const int32_t each = kBytesPerElement + (sums ? kSumBytesPerColumn : 0);
  const int64_t room = (ub_bytes - kReservedBytes) / each / 64;
  const int64_t largest = least(room * 64, 2048);
  // With few rows, chunks are narrow, so that there are enough for the cores.
  const int64_t columns = up((lane * tiling.rows + cores - 1) / cores, 16);
  tiling.lane_width = static_cast<int32_t>(lane);
  tiling.chunk = static_cast<int32_t>(least(least(lane, largest), most(columns, 16)));
  const int64_t chunks = tiling.chunks();
  // A tile has as many rows as fit, but not more than a core's share of them.
  const int64_t share = (tiling.rows * chunks + cores - 1) / cores;
  tiling.tile_rows = static_cast<int32_t>(most(1, least(largest / tiling.chunk, share)));
  const int64_t wanted = sums ? share : tiling.tile_rows;
  tiling.piece_rows = static_cast<int32_t>(up(most(wanted, 1), tiling.tile_rows));
  tiling.elements = static_cast<int32_t>(up(int64_t{tiling.tile_rows} * tiling.chunk, 64));
}

}  // namespace npu_ops
