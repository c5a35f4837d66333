// Copies, broadcasts, gathers and transpositions inside the unified buffer: CCE intrinsic guide,
// 6.3.11 and 6.3.5.8.
#pragma once

#include <cstring>
#include <utility>

#include "lanes.h"

// CCE intrinsic guide, 6.3.11.1.
template <class T, class S>
inline void vector_dup(T* to, S scalar, uint8_t repeats, uint16_t to_block, uint16_t,
                       uint16_t to_repeat, uint16_t) {
  using namespace npu_ops::twin;
  issue("vector_dup", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  const Operand<T> target{to, to_block, to_repeat};
  const Extent extent(repeats, per_repeat<T>());
  const T value = T(scalar);
  npu_ops::twin::touch(Access::kWrite, target, extent);
  extent.each([&](int r, int e) { *target.at(r, e) = value; });
}

// 6.3.5.8: each of eight elements fills a block of 32 bytes. The mask is ignored.
template <class T>
inline void vbrcb(T* to, T* from, uint16_t to_block, uint16_t to_repeat, uint8_t repeats) {
  using namespace npu_ops::twin;
  issue("vbrcb", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  aligned(from, kBlockBytes, "the source");
  const Operand<T> target{to, to_block, to_repeat};
  for (int r = 0; r < repeats; ++r) {
    touch(Access::kRead, from + r * 8, 8 * sizeof(T));
    for (int block = 0; block < 8; ++block) {
      T* at = target.at(r, block * Operand<T>::kPerBlock);
      touch(Access::kWrite, at, kBlockBytes);
      std::fill_n(at, Operand<T>::kPerBlock, from[r * 8 + block]);
    }
  }
}

// 6.3.11.2: gathers elements at byte offsets. A repeat reads all its elements before it writes,
// because kernels gather in place. The headers cut the source's address to 32 bits; registers() has
// all of it.
template <class T>
inline void vgather(T* to, uint32_t* offsets, uint32_t, uint16_t to_repeat, uint8_t repeats) {
  using namespace npu_ops::twin;
  issue("vgather", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  const Operand<T> target{to, 1, to_repeat};
  const Extent extent(repeats, per_repeat<T>());
  for (int r = 0; r < extent.repeats(); ++r) {
    T values[kRepeatBytes / sizeof(T)];
    for (int e = 0; e < extent.per_repeat(); ++e) {
      if (!extent.has(r, e)) continue;
      uint32_t* offset = offsets + int64_t{r} * extent.per_repeat() + e;
      touch(Access::kRead, offset, sizeof(uint32_t));
      const auto* from = reinterpret_cast<T*>(registers().gathered + *offset);
      touch(Access::kRead, from, sizeof(T));
      values[e] = *from;
    }
    for (int e = 0; e < extent.per_repeat(); ++e) {
      if (!extent.has(r, e)) continue;
      touch(Access::kWrite, target.at(r, e), sizeof(T));
      *target.at(r, e) = values[e];
    }
  }
}

// 6.3.11.3: gathers whole blocks at byte offsets. The mask is ignored.
template <class T>
inline void vgatherb(T* to, uint32_t* offsets, uint32_t, uint16_t to_repeat, uint8_t to_block,
                     uint8_t repeats) {
  using namespace npu_ops::twin;
  issue("vgatherb", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  const Operand<T> target{to, to_block, to_repeat};
  for (int r = 0; r < repeats; ++r) {
    for (int block = 0; block < 8; ++block) {
      uint32_t* offset = offsets + r * 8 + block;
      touch(Access::kRead, offset, sizeof(uint32_t));
      const uint8_t* from = registers().gathered + *offset;
      aligned(from, kBlockBytes, "a gathered block");
      T* at = target.at(r, block * Operand<T>::kPerBlock);
      touch(Access::kRead, from, kBlockBytes);
      touch(Access::kWrite, at, kBlockBytes);
      std::memcpy(at, from, kBlockBytes);
    }
  }
}

// CCE intrinsic guide, 6.3.11.4.
inline void set_va_reg_sb(ub_addr8_t to, const uint64_t* addresses) {
  std::memcpy(npu_ops::twin::registers().blocks[to], addresses, 8 * sizeof(uint64_t));
}

namespace npu_ops::twin {

// 6.3.11.4: transposes sixteen source blocks to sixteen target blocks, each sixteen given by two
// registers. `from(e, k)` is the source block and element of element `first + k` of block e. The
// mask is ignored.
template <class T, class F>
void scatter_blocks(const char* name, ub_addr8_t to, ub_addr8_t source, int repeats, int to_stride,
                    int source_stride, int first, F from) {
  constexpr int kBlocks = 16, kEach = sizeof(T) == 4 ? 8 : 16;
  issue(name, PIPE_V);
  const auto block = [](ub_addr8_t pair, int i, int64_t offset) {
    return reinterpret_cast<T*>(registers().blocks[pair + i / 8][i % 8] + offset * kBlockBytes);
  };
  for (int r = 0; r < repeats; ++r) {
    T values[kBlocks][kEach];
    for (int i = 0; i < kBlocks; ++i) {
      const T* at = block(source, i, int64_t{r} * source_stride);
      aligned(at, kBlockBytes, "a block of the source");
      touch(Access::kRead, at, kBlockBytes);
    }
    for (int e = 0; e < kBlocks; ++e)
      for (int k = 0; k < kEach; ++k) {
        const auto [i, element] = from(e, k);
        values[e][k] = block(source, i, int64_t{r} * source_stride)[element];
      }
    for (int e = 0; e < kBlocks; ++e) {
      T* at = block(to, e, int64_t{r} * to_stride);
      aligned(at, kBlockBytes, "a block of the target");
      touch(Access::kWrite, at + first, sizeof(values[e]));
      std::memcpy(at + first, values[e], sizeof(values[e]));
    }
  }
}

}  // namespace npu_ops::twin

inline void scatter_vnchwconv_b32(ub_addr8_t to, ub_addr8_t from, uint8_t repeats,
                                  uint16_t to_stride, uint16_t from_stride) {
  npu_ops::twin::scatter_blocks<uint32_t>(
      "scatter_vnchwconv_b32", to, from, repeats, to_stride, from_stride, 0,
      [](int e, int k) { return std::pair(k + e % 2 * 8, e / 2); });
}
inline void scatter_vnchwconv_b16(ub_addr8_t to, ub_addr8_t from, uint8_t repeats,
                                  uint16_t to_stride, uint16_t from_stride) {
  npu_ops::twin::scatter_blocks<uint16_t>("scatter_vnchwconv_b16", to, from, repeats, to_stride,
                                          from_stride, 0,
                                          [](int e, int k) { return std::pair(k, e); });
}
inline void scatter_vnchwconv_b8(ub_addr8_t to, ub_addr8_t from, uint8_t repeats,
                                 uint16_t to_stride, uint16_t from_stride, bool to_high,
                                 bool from_high) {
  npu_ops::twin::scatter_blocks<uint8_t>(
      "scatter_vnchwconv_b8", to, from, repeats, to_stride, from_stride, to_high ? 16 : 0,
      [from_high](int e, int k) { return std::pair(k, e + (from_high ? 16 : 0)); });
}

// 6.3.11.5: transposes a 16 x 16 matrix of 16-bit elements. The mask is ignored.
template <class T>
inline void vtranspose(T* to, T* from) {
  static_assert(sizeof(T) == 2);
  using namespace npu_ops::twin;
  issue("vtranspose", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  aligned(from, kBlockBytes, "the source");
  T matrix[256];
  touch(Access::kRead, from, sizeof(matrix));
  touch(Access::kWrite, to, sizeof(matrix));
  std::memcpy(matrix, from, sizeof(matrix));
  for (int i = 0; i < 256; ++i) to[i] = matrix[i % 16 * 16 + i / 16];
}
