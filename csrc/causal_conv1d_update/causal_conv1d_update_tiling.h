// Constants and the tiling that host and device share in causal_conv1d_update.
#pragma once

#include "common/ascendc_types.h"

namespace npu_ops {

constexpr int32_t kOwnBlock = 16;  // elements on chip per channel that is loaded on its own

// A matrix [channels, columns] in a tensor: its two strides in elements, one of which is 1. mixed:
// other cores may write to the memory between its channels.
struct Plane {
  int64_t channel, column;
  int32_t mixed;

  NPU_OPS_SHARED bool apart() const { return channel != 1; }  // channels are not contiguous
  // Whether the gaps between channels are loaded too, because they are small.
  NPU_OPS_SHARED bool whole() const { return !mixed && channel <= kOwnBlock; }
};

// Returns the elements that a channel takes in the unified buffer if channels are not contiguous.
NPU_OPS_SHARED int32_t pitch_on_chip(const Plane& plane) {
  return plane.whole() ? static_cast<int32_t>(plane.channel) : kOwnBlock;
}

struct CausalConv1dUpdateTiling {
  int64_t sequences, tokens, slots, columns, windows, pad;  // columns: of a state
  int64_t x_batch, x_token, y_batch, y_token, state_slot, window_row, window_token;
  Plane weight, state, window;
  int32_t channels, width, silu, update;
  int32_t type, weight_type, bias_type;                            // ElementType
  int32_t wide_indices, wide_accepted, wide_starts, wide_windows;  // whether int64

  int32_t block;        // channels of a piece of work, a multiple of 64
  int32_t tile_tokens;  // tokens on chip at once
  int32_t loaded;       // bytes per channel of the buffer for filters and histories

  NPU_OPS_SHARED int64_t blocks() const { return (channels + block - 1) / block; }
  NPU_OPS_SHARED int64_t pieces() const { return sequences * blocks(); }
  NPU_OPS_SHARED int32_t before() const { return width - 1; }
  NPU_OPS_SHARED int32_t rows() const {
    return before() + tile_tokens;
  }  // rows per tile, with those before it
  NPU_OPS_SHARED bool spreads() const { return state.apart() || window.apart(); }
};

// The most tokens of a tile. It is more than W - 1, because every tile loads the W - 1 rows before
// it again.
constexpr int32_t kMostTokens = 8;
// The most channels of a block. Wider blocks gain nothing. If channels are not contiguous, an
// instruction has a repeat for every few channels, and at most 255 repeats.
constexpr int64_t kWidestBlock = 1024, kWidestApart = 512;

// Computes the sizes of blocks and tiles. Blocks share the channels among `cores`, even for a
// single token, but have at least 64 channels.
inline void cut(CausalConv1dUpdateTiling& tiling, int64_t cores, int64_t ub_bytes) {
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b * b; };
  const auto size = [](int32_t type) { return type == kFloat32 ? 4 : 2; };
  const auto on_chip = [&](const Plane& plane, int32_t type) {
    return plane.apart() ? pitch_on_chip(plane) * size(type) : 0;
  };
  tiling.tile_tokens = static_cast<int32_t>(least(tiling.tokens, kMostTokens));
  const int32_t filter = tiling.width * size(tiling.weight_type);
  tiling.loaded =
      static_cast<int32_t>(most(most(filter, 4), most(on_chip(tiling.weight, tiling.weight_type),
                                                      on_chip(tiling.state, tiling.type))));
  // There are two buffers each of rows, results and loaded columns. In 32 bits: rows, results,
  // scratch, taps, bias, a column, offsets and channel numbers.
  int64_t each = 2 * (tiling.rows() + tiling.tile_tokens) * size(tiling.type) + 2 * tiling.loaded +
                 4 * (tiling.rows() + 2 * tiling.tile_tokens + tiling.width + 4);
  if (tiling.spreads()) each += kOwnBlock * (2 * size(tiling.type) + 4);
  const int64_t fit = (ub_bytes - kReservedBytes) / each / 64 * 64;
  const int64_t widest = least(fit, tiling.spreads() ? kWidestApart : kWidestBlock);
  const int64_t share = (tiling.channels * tiling.sequences + cores - 1) / cores;
  const int64_t block = most(64, least(widest, up(share, 64)));
  const int64_t blocks = (tiling.channels + block - 1) / block;
  tiling.block = static_cast<int32_t>(up((tiling.channels + blocks - 1) / blocks, 64));
}

}  // namespace npu_ops
