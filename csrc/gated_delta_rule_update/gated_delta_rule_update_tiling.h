// Constants and the tiling that host and device share in gated_delta_rule_update.
#pragma once

#include "common/ascendc_types.h"

namespace npu_ops {

// The most tokens on chip at once: a repeat of a vector instruction has eight blocks, one per
// token.
constexpr int32_t kTileTokens = 8;
// Rows of partial sums, when rows of the state are summed (SumOverKeys).
constexpr int32_t kSumRows = 32;
// The most keys of a head (npu_ops/ops/gated_delta_rule_update/op.py).
constexpr int32_t kMostKeys = 256;

struct GatedDeltaRuleUpdateTiling {
  // length: tokens per sequence, unless they are packed. rows, steps: the first two sizes of the
  // intermediate states. Without them, steps is the number of slots per sequence, or 0 if each
  // sequence has a single slot.
  int64_t sequences, length, tokens, slots, rows, steps;
  int64_t q_token, k_token, v_token, a_token, b_token;  // elements from one token to the next
  int64_t state_slot, kept_row, kept_step, index_sequence, index_token;
  int32_t heads, value_heads, keys, values;
  int32_t q_type, k_type, v_type, a_type, b_type, rate_type, bias_type, state_type;  // ElementType
  int32_t wide_indices, wide_starts, wide_accepted, wide_kept;  // whether int64
  int32_t packed, normalize, v_first, update, slot_per_token;
  float scale;

  int32_t block;        // values per piece of work
  int32_t tile_tokens;  // tokens on chip at once

  NPU_OPS_SHARED int32_t blocks() const { return (values + block - 1) / block; }
  // The number of sequences to process. Packed tokens have one more, for the tokens of no sequence.
  NPU_OPS_SHARED int64_t walked() const { return sequences + packed; }
  NPU_OPS_SHARED int64_t pieces() const { return walked() * value_heads * blocks(); }
  // The stride of rows on chip, in elements.
  NPU_OPS_SHARED int32_t key_stride() const { return (keys + 15) / 16 * 16; }
  NPU_OPS_SHARED int32_t value_stride() const { return (block + 15) / 16 * 16; }
  // The state of a piece on chip: [values, keys] if v_first, else [keys, values].
  NPU_OPS_SHARED int32_t state_rows() const { return v_first ? block : keys; }
  NPU_OPS_SHARED int32_t state_stride() const { return v_first ? key_stride() : value_stride(); }
  NPU_OPS_SHARED int32_t state_elements() const { return state_rows() * state_stride(); }
  NPU_OPS_SHARED int32_t partial_elements() const {
    return v_first ? 64 * block : kSumRows * value_stride();
  }
};

inline int64_t element_bytes(int32_t type) { return type == kFloat32 ? 4 : 2; }

// Bytes of the unified buffer that a piece needs.
inline int64_t on_chip(const GatedDeltaRuleUpdateTiling& t) {
  const int64_t keys = t.key_stride(), values = t.value_stride(), tokens = t.tile_tokens;
  const int64_t state = t.state_elements() * (4 * element_bytes(t.state_type) + 4);
  const int64_t loaded = tokens * (keys * (element_bytes(t.q_type) + element_bytes(t.k_type)) +
                                   values * element_bytes(t.v_type) + 2 * 64) +
                         2 * 64;
  const int64_t stored = tokens * values * element_bytes(t.v_type);
  // wide: q, k, v, o, change_ and recalled_. spread: eight floats for each element of a vector.
  const int64_t wide = tokens * (2 * keys + 2 * values) + 2 * values;
  const int64_t spread = 8 * (t.v_first ? values : 2 * keys);
  const int64_t gates = 10 * 64 + 16 * kTileTokens;
  return state + 2 * (loaded + stored) + 4 * (wide + spread + gates + t.partial_elements());
}

// Chooses the block: of the sizes that fit, the one with the least estimated time.
inline void cut(GatedDeltaRuleUpdateTiling& tiling, int64_t cores, int64_t ub_bytes) {
  const int64_t step = tiling.v_first ? 8 : 16, overhead = 8;
  const int64_t most = tiling.packed ? tiling.tokens : tiling.length;
  tiling.tile_tokens = static_cast<int32_t>(most < kTileTokens ? most : kTileTokens);
  int64_t least = -1;
  for (int64_t blocks = 1; blocks <= (tiling.values + step - 1) / step; ++blocks) {
    GatedDeltaRuleUpdateTiling tried = tiling;
    tried.block =
        static_cast<int32_t>(((tiling.values + blocks - 1) / blocks + step - 1) / step * step);
    // One instruction processes all rows of a block, and repeats at most 255 times.
    if (tried.block > 248 || on_chip(tried) > ub_bytes - kReservedBytes) continue;
    const int64_t time = (tried.pieces() + cores - 1) / cores * (tried.block + overhead);
    if (least >= 0 && time >= least) continue;
    least = time;
    tiling.block = tried.block;
  }
}

}  // namespace npu_ops
