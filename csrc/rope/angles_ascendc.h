// The angles of tokens and the rotation of their heads, for AscendC kernels. References:
// npu_ops/ops/rope/reference.py and npu_ops/ops/mrope/reference.py
//
// A head is rotated as x * C + swapped(x) * S, with a token's coefficients C and S for all of its
// elements. The axis, table entry and sign of an element are the same for all tokens. So they are
// computed once, as offsets for Gather and as signs. Gather also swaps the two elements of a pair.
// If each half of a head is a whole number of 32-byte blocks, the halves are instead multiplied
// crosswise.
#pragma once

#include "common/rows_ascendc.h"
#include "rope/rotary_tiling.h"

namespace npu_ops {

using Offsets = AscendC::LocalTensor<uint32_t>;

class Angles {
 public:
  __aicore__ inline Angles(Rows& rows, const AnglesTiling& tiling, GM_ADDR cos, GM_ADDR sin,
                           GM_ADDR positions)
      : tiling_(tiling),
        rows_(rows),
        cos_(cos),
        sin_(sin),
        positions_(positions),
        row_(up(tiling.rotary_dim)) {
    rows_.pipe_.InitBuffer(table_queue_, 2, tiling.axes * row_ * sizeof(float));
    table_ = rows_.floats(tiling.axes * row_);
    c_ = rows_.floats(row_);
    s_ = rows_.floats(row_);
    sign_ = rows_.floats(row_);
    of_cos_ = rows_.floats(row_).ReinterpretCast<uint32_t>();
    of_sin_ = rows_.floats(row_).ReinterpretCast<uint32_t>();
    whole_halves_ = !tiling.interleaved && tiling.rotary_dim % 16 == 0;
    if (!whole_halves_) swap_ = rows_.tile_of_floats().ReinterpretCast<uint32_t>();
    FillOffsets();
  }

  // Prepares C and S of a token, given its index among the tokens of all batches. An axis whose
  // position is outside of the table has no row: its coefficients are NaN.
  __aicore__ inline void prepare(int64_t index) {
    if (prepared_ == index) return;
    prepared_ = index;
    const int64_t batch = index / tiling_.length, token = index % tiling_.length;
    int64_t rows[3] = {token, token, token};
    for (int32_t axis = 0; positions_ && axis < tiling_.axes; ++axis) {
      const int64_t row = integer(positions_, tiling_.wide_positions,
                                  axis * tiling_.positions.axis + batch * tiling_.positions.batch +
                                      token * tiling_.positions.row);
      rows[axis] = row < tiling_.table_rows ? row : kNoRow;
    }
    Take(c_, cos_, tiling_.cos, of_cos_, batch, rows);
    Take(s_, sin_, tiling_.sin, of_sin_, batch, rows);
    AscendC::Mul(s_, s_, sign_, row_);
    nobodys_ = rows[0] == kNobody;
  }

  // Returns whether the prepared token belongs to no sequence.
  __aicore__ inline bool nobodys() const { return nobodys_; }

  // Rotates a tile of the token's heads; `crossed` is another tile, used as scratch.
  __aicore__ inline void rotate(Floats x, Floats crossed, RowTile tile) {
    Cross(crossed, x, tile);
    rows_.times_row(x, x, c_, tiling_.rotary_dim, tile);
    rows_.plus(x, crossed, tiling_.rotary_dim, tile);
  }

 private:
  __aicore__ static inline int32_t up(int32_t count) { return (count + 63) / 64 * 64; }

  // These functions return the pair of element `e`, whether `e` is the second of the pair, and the
  // other element of the pair.
  __aicore__ inline int32_t pair_of(int32_t e) const {
    return tiling_.interleaved ? e / 2 : e % (tiling_.rotary_dim / 2);
  }
  __aicore__ inline bool is_second(int32_t e) const {
    return tiling_.interleaved ? e % 2 == 1 : e >= tiling_.rotary_dim / 2;
  }
  __aicore__ inline int32_t other(int32_t e) const {
    const int32_t apart = tiling_.interleaved ? 1 : tiling_.rotary_dim / 2;
    return is_second(e) ? e - apart : e + apart;
  }

  // Returns the byte offset of the table entry of element `e`, from the first axis' row. In a
  // full-width table, it is the offset of entry `at`.
  __aicore__ inline uint32_t entry(int32_t e, int32_t at) const {
    const bool full = tiling_.table_width == tiling_.rotary_dim;
    const int32_t pair = pair_of(e);
    return (tiling_.axis_of_pair[pair] * row_ + (full ? at : pair)) * sizeof(float);
  }

  __aicore__ inline void FillOffsets() {
    const int32_t width = tiling_.rotary_dim, stride = rows_.tiling().stride;
    // The scalar unit must not write before the vector pipe has zeroed the buffers.
    Wait<AscendC::HardEvent::V_S>();
    for (int32_t e = 0; e < width; ++e) {
      of_cos_.SetValue(e, entry(e, e));
      of_sin_.SetValue(e, entry(e, tiling_.inverse ? other(e) : e));
      sign_.SetValue(e, is_second(e) != (tiling_.inverse != 0) ? 1.0f : -1.0f);
    }
    if (!whole_halves_)
      for (int32_t e = 0; e < stride; ++e)
        swap_.SetValue(e, (e < width ? other(e) : e) * sizeof(float));
    Wait<AscendC::HardEvent::S_V>();
    if (whole_halves_) return;
    const auto first = swap_.ReinterpretCast<int32_t>();
    for (int32_t row = 1; row < rows_.tiling().tile_rows; ++row)
      AscendC::Adds(first[row * stride], first, static_cast<int32_t>(row * stride * sizeof(float)),
                    stride);
  }

  // Gathers `to` from the table rows of all axes. An axis without a row gives NaN.
  __aicore__ inline void Take(Floats to, GM_ADDR from, const Table& table, Offsets offsets,
                              int64_t batch, const int64_t* rows) {
    const auto type = static_cast<ElementType>(tiling_.table_type);
    const int32_t width = tiling_.table_width;
    AscendC::LocalTensor<uint8_t> loaded = table_queue_.AllocTensor<uint8_t>();
    for (int32_t axis = 0; axis < tiling_.axes; ++axis) {
      const int64_t offset = axis * table.axis + batch * table.batch + rows[axis] * table.row;
      if (rows[axis] >= 0)
        copy_in(loaded[axis * row_ * bytes_of(type)], from + offset * bytes_of(type), type,
                {1, width, width}, row_);
    }
    table_queue_.EnQue(loaded);
    loaded = table_queue_.DeQue<uint8_t>();
    for (int32_t axis = 0; axis < tiling_.axes; ++axis) {
      if (rows[axis] >= 0)
        widen(table_, loaded, type, axis * row_, width);
      else
        AscendC::Duplicate(table_[axis * row_], __builtin_nanf(""), width);
    }
    table_queue_.FreeTensor(loaded);
    AscendC::Gather(to, table_, offsets, 0, static_cast<uint32_t>(row_));
  }

  // Computes crossed = swapped(x) * S.
  __aicore__ inline void Cross(Floats crossed, Floats x, RowTile tile) {
    const int32_t half = tiling_.rotary_dim / 2;
    if (whole_halves_) {
      rows_.times_row(crossed, x[half], s_, half, tile);
      rows_.times_row(crossed[half], x, s_[half], half, tile);
      return;
    }
    AscendC::Gather(crossed, x, swap_, 0, static_cast<uint32_t>(rows_.count(tile)));
    rows_.times_row(crossed, crossed, s_, tiling_.rotary_dim, tile);
  }

  AnglesTiling tiling_;
  Rows& rows_;
  __gm__ uint8_t *cos_, *sin_, *positions_;
  static constexpr int64_t kNoRow = -1;
  int64_t prepared_ = -1;
  int32_t row_;  // floats of a table's row on chip
  bool whole_halves_, nobodys_ = false;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> table_queue_;
  Floats table_, c_, s_, sign_;
  Offsets of_cos_, of_sin_, swap_;
};

}  // namespace npu_ops
