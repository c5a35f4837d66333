// Copies, broadcasts, gathers and transpositions inside the unified buffer: guide 6.3.11, 6.3.5.8.
#pragma once

#include <cstring>

#include "lanes.h"

// 6.3.11.1
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

// 6.3.5.8: eight elements become eight blocks. The mask has no say.
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

// 6.3.11.2: elements at byte offsets. The headers cut the source's address to 32 bits; registers()
// holds the whole one.
template <class T>
inline void vgather(T* to, uint32_t* offsets, uint32_t, uint16_t to_repeat, uint8_t repeats) {
  using namespace npu_ops::twin;
  issue("vgather", PIPE_V);
  aligned(to, kBlockBytes, "the target");
  const Operand<T> target{to, 1, to_repeat};
  const Extent extent(repeats, per_repeat<T>());
  extent.each([&](int r, int e) {
    uint32_t* offset = offsets + int64_t{r} * extent.per_repeat() + e;
    touch(Access::kRead, offset, sizeof(uint32_t));
    const auto* from = reinterpret_cast<T*>(registers().gathered + *offset);
    touch(Access::kRead, from, sizeof(T));
    touch(Access::kWrite, target.at(r, e), sizeof(T));
    *target.at(r, e) = *from;
  });
}

// 6.3.11.3: whole blocks at byte offsets. The mask has no say.
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

// 6.3.11.5: a 16 x 16 matrix of 16-bit elements. The mask has no say.
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
