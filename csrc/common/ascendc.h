// Helpers of AscendC kernels: copies of tiles between global memory and the unified buffer, and
// casts of element types that are known only at run time. Included only by device code.
#pragma once

#include <kernel_operator.h>

#include "common/ascendc_types.h"

namespace npu_ops {

// A tile in global memory: `rows` rows of `columns` elements.
struct TileShape {
  int32_t rows, columns;
  int64_t pitch;  // elements from row to row; unused if there is one row
};

__aicore__ inline uint32_t bytes_of(ElementType type) { return type == kFloat32 ? 4 : 2; }
__aicore__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Reads element `at` of an int64 (`wide`) or int32 tensor, on the scalar unit.
__aicore__ inline int64_t integer(GM_ADDR from, bool wide, int64_t at) {
  AscendC::GlobalTensor<int64_t> of_wide;
  AscendC::GlobalTensor<int32_t> of_narrow;
  of_wide.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(from));
  of_narrow.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(from));
  return wide ? of_wide.GetValue(at) : of_narrow.GetValue(at);
}

// Returns whether `starts`, the cu_seqlens with `sequences` + 1 elements, begins with 0, never
// decreases and ends at or before `tokens`: see npu_ops/core/lengths.py. Runs on the scalar unit,
// once per core.
__aicore__ inline bool are_right(GM_ADDR starts, bool wide, int64_t sequences, int64_t tokens) {
  int64_t last = integer(starts, wide, 0);
  bool right = last == 0;
  for (int64_t n = 1; n <= sequences; ++n) {
    const int64_t next = integer(starts, wide, n);
    right = right && last <= next;
    last = next;
  }
  return right && last <= tokens;
}

// Makes one pipe wait for another: Wait<HardEvent::S_V>() makes V wait for S.
template <AscendC::HardEvent event>
__aicore__ inline void Wait() {
  const auto id = static_cast<int32_t>(GetTPipePtr()->FetchEventID(event));
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// Merges rows that are contiguous in both memories into one row, because each row costs a burst.
__aicore__ inline TileShape in_one_run(TileShape tile, int32_t stride) {
  const bool follows = tile.columns == stride && tile.pitch == stride;
  return follows ? TileShape{1, tile.rows * stride, 0} : tile;
}

// Copies the tile's rows as bytes, because the element type is known only at run time. In the
// unified buffer, rows begin `stride` elements apart, a multiple of 16.
__aicore__ inline void copy_in(AscendC::LocalTensor<uint8_t> to, GM_ADDR from, ElementType type,
                               TileShape shape, int32_t stride) {
  const TileShape tile = in_one_run(shape, stride);
  const uint32_t size = bytes_of(type), bytes = tile.columns * size;
  // A burst must begin after the end of the burst before, so rows that overlap, e.g. of an expanded
  // tensor, are copied one by one.
  const int64_t between = tile.pitch - tile.columns;
  const int32_t times = between < 0 ? tile.rows : 1, bursts = between < 0 ? 1 : tile.rows;
  const uint32_t gap = bursts == 1 ? 0 : (stride * size - (bytes + 31) / 32 * 32) / 32;
  const auto skipped = static_cast<uint32_t>(bursts == 1 ? 0 : between * size);
  AscendC::GlobalTensor<uint8_t> source;
  source.SetGlobalBuffer(from);
  for (int32_t row = 0; row < times; ++row)
    AscendC::DataCopyPad(
        to[row * stride * size], source[row * tile.pitch * size],
        AscendC::DataCopyExtParams{static_cast<uint16_t>(bursts), bytes, skipped, gap, 0},
        AscendC::DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
}

__aicore__ inline void copy_out(GM_ADDR to, AscendC::LocalTensor<uint8_t> from, ElementType type,
                                TileShape shape, int32_t stride) {
  const TileShape tile = in_one_run(shape, stride);
  const uint32_t size = bytes_of(type), bytes = tile.columns * size;
  AscendC::GlobalTensor<uint8_t> target;
  target.SetGlobalBuffer(to);
  const uint32_t gap = tile.rows == 1 ? 0 : (stride * size - (bytes + 31) / 32 * 32) / 32;
  const auto skipped =
      static_cast<uint32_t>(tile.rows == 1 ? 0 : (tile.pitch - tile.columns) * size);
  AscendC::DataCopyPad(
      target, from,
      AscendC::DataCopyExtParams{static_cast<uint16_t>(tile.rows), bytes, gap, skipped, 0});
}

// Kernels compute in fp32; only widen and narrow handle bf16 and fp16.
__aicore__ inline void widen(AscendC::LocalTensor<float> to, AscendC::LocalTensor<uint8_t> from,
                             ElementType type, int32_t first, int32_t count) {
  using namespace AscendC;
  if (type == kFloat32)
    Muls(to[first], from.ReinterpretCast<float>()[first], 1.0f, count);
  else if (type == kFloat16)
    Cast(to[first], from.ReinterpretCast<half>()[first], RoundMode::CAST_NONE, count);
  else
    Cast(to[first], from.ReinterpretCast<bfloat16_t>()[first], RoundMode::CAST_NONE, count);
}

__aicore__ inline void narrow(AscendC::LocalTensor<uint8_t> to, AscendC::LocalTensor<float> from,
                              ElementType type, int32_t first, int32_t count) {
  using namespace AscendC;
  if (type == kFloat32)
    Muls(to.ReinterpretCast<float>()[first], from[first], 1.0f, count);
  else if (type == kFloat16)
    Cast(to.ReinterpretCast<half>()[first], from[first], RoundMode::CAST_RINT, count);
  else
    Cast(to.ReinterpretCast<bfloat16_t>()[first], from[first], RoundMode::CAST_RINT, count);
}

// Calls f(first, count) for each run of valid elements. Rows that fill their stride are one run;
// otherwise each row is a run, because the elements between rows were never written.
template <class F>
__aicore__ inline void each_run(TileShape tile, int32_t stride, F f) {
  if (tile.columns == stride) return f(0, tile.rows * stride);
  for (int32_t row = 0; row < tile.rows; ++row) f(row * stride, tile.columns);
}

}  // namespace npu_ops
