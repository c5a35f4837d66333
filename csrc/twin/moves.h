// Copies between global memory and the unified buffer: CCE intrinsic guide, 6.2.2 and 6.5.
#pragma once

#include <cstring>

#include "arithmetic.h"

namespace npu_ops::twin {

template <class T>
void accumulate(char* to, const char* from, size_t bytes) {
  const Atomic kind = registers().atomic;
  for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T old, value;
    std::memcpy(&old, to + i, sizeof(T));
    std::memcpy(&value, from + i, sizeof(T));
    const float a = float(old), b = float(value);
    if (kind == Atomic::kAdd) value = narrow<T>(Wide<T>(old) + Wide<T>(value));
    if (kind == Atomic::kMax && a > b) value = old;
    if (kind == Atomic::kMin && a < b) value = old;
    std::memcpy(to + i, &value, sizeof(T));
  }
}

// 6.5.2: with atomics on, a store to global memory adds to the old value, or keeps the larger or
// the smaller of both.
inline void store(char* to, const char* from, size_t bytes) {
  if (registers().atomic == Atomic::kNone) {
    std::memcpy(to, from, bytes);
    return;
  }
  switch (registers().atomic_type) {
    case AtomicType::kF32:
      return accumulate<float>(to, from, bytes);
    case AtomicType::kF16:
      return accumulate<half>(to, from, bytes);
    case AtomicType::kS16:
      return accumulate<int16_t>(to, from, bytes);
    case AtomicType::kS32:
      return accumulate<int32_t>(to, from, bytes);
    case AtomicType::kS8:
      return accumulate<int8_t>(to, from, bytes);
    case AtomicType::kBf16:
      return accumulate<bfloat16_t>(to, from, bytes);
    case AtomicType::kNone:
      not_emulated("an atomic store of no type");
  }
}

// 6.5.3: bursts of whole blocks, with gaps between the end of one and the start of the next.
struct Bursts {
  int count;
  int64_t bytes, source_gap, target_gap;
};

inline void copy(void* target, const void* source, const Bursts& bursts, bool to_global) {
  for (int i = 0; i < bursts.count; ++i) {
    char* to = static_cast<char*>(target) + i * (bursts.bytes + bursts.target_gap);
    const char* from = static_cast<const char*>(source) + i * (bursts.bytes + bursts.source_gap);
    touch(Access::kRead, from, bursts.bytes);
    touch(Access::kWrite, to, bursts.bytes);
    if (to_global)
      store(to, from, bursts.bytes);
    else
      std::memmove(to, from, bursts.bytes);
  }
}

inline int64_t whole_blocks(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// 6.5.9.2: bursts of any length. Each fills whole blocks, with its data after `left` elements. All
// other elements get the padding value or, if left and right are 0, the burst's first element.
inline void load_padded(void* target, const void* source, int count, uint32_t bytes, int left,
                        int right, uint32_t source_gap, uint32_t target_gap, int element) {
  aligned(target, kBlockBytes, "the target");
  const int64_t filled = whole_blocks(bytes + int64_t{left + right} * element);
  for (int i = 0; i < count; ++i) {
    char* to = static_cast<char*>(target) + i * (filled + int64_t{target_gap} * kBlockBytes);
    const char* from = static_cast<const char*>(source) + i * (int64_t{bytes} + source_gap);
    touch(Access::kRead, from, bytes);
    touch(Access::kWrite, to, filled);
    uint64_t padding = registers().padding;
    if (!left && !right) std::memcpy(&padding, from, std::min<size_t>(element, bytes));
    for (int64_t at = 0; at < filled; at += element) std::memcpy(to + at, &padding, element);
    std::memcpy(to + int64_t{left} * element, from, bytes);
  }
}

// 6.5.9.3: the padding of the last block is read and dropped.
inline void store_padded(void* target, const void* source, int count, uint32_t bytes,
                         uint32_t source_gap, uint32_t target_gap) {
  aligned(source, kBlockBytes, "the source");
  const int64_t filled = whole_blocks(bytes);
  for (int i = 0; i < count; ++i) {
    char* to = static_cast<char*>(target) + i * (int64_t{bytes} + target_gap);
    const char* from =
        static_cast<const char*>(source) + i * (filled + int64_t{source_gap} * kBlockBytes);
    skim(from, filled);
    touch(Access::kRead, from, bytes);
    touch(Access::kWrite, to, bytes);
    store(to, from, bytes);
  }
}

inline Bursts in_blocks(int count, int length, int source_gap, int target_gap) {
  return {count, int64_t{length} * kBlockBytes, int64_t{source_gap} * kBlockBytes,
          int64_t{target_gap} * kBlockBytes};
}

}  // namespace npu_ops::twin

// CCE intrinsic guide, 6.5.3.2.
inline void copy_gm_to_ubuf(void* target, const void* source, uint8_t, uint16_t count,
                            uint16_t length, uint16_t source_gap, uint16_t target_gap) {
  using namespace npu_ops::twin;
  issue("copy_gm_to_ubuf", PIPE_MTE2);
  aligned(target, kBlockBytes, "the target");
  copy(target, source, in_blocks(count, length, source_gap, target_gap), false);
}

// CCE intrinsic guide, 6.5.3.3.
inline void copy_ubuf_to_gm(void* target, const void* source, uint8_t, uint16_t count,
                            uint16_t length, uint16_t source_gap, uint16_t target_gap,
                            bm_t mode = BM_DISABLE) {
  using namespace npu_ops::twin;
  issue("copy_ubuf_to_gm", PIPE_MTE3);
  if (mode != BM_DISABLE) not_emulated("copy_ubuf_to_gm in bytes");
  aligned(source, kBlockBytes, "the source");
  copy(target, source, in_blocks(count, length, source_gap, target_gap), true);
}

// CCE intrinsic guide, 6.5.3.4.
inline void copy_ubuf_to_ubuf(void* target, const void* source, uint8_t, uint16_t count,
                              uint16_t length, uint16_t source_gap, uint16_t target_gap) {
  using namespace npu_ops::twin;
  issue("copy_ubuf_to_ubuf", PIPE_V);
  aligned(target, kBlockBytes, "the target");
  aligned(source, kBlockBytes, "the source");
  copy(target, source, in_blocks(count, length, source_gap, target_gap), false);
}

// CCE intrinsic guide, 6.5.9.2 and 6.5.9.3.
#define NPU_OPS_TWIN_PADDED(SUFFIX, BYTES)                                                        \
  inline void copy_gm_to_ubuf_align_##SUFFIX(                                                     \
      void* target, const void* source, uint8_t, uint16_t count, uint32_t bytes, uint8_t left,    \
      uint8_t right, uint32_t source_gap, uint32_t target_gap) {                                  \
    npu_ops::twin::issue("copy_gm_to_ubuf_align_" #SUFFIX, PIPE_MTE2);                            \
    npu_ops::twin::load_padded(target, source, count, bytes, left, right, source_gap, target_gap, \
                               BYTES);                                                            \
  }                                                                                               \
  inline void copy_ubuf_to_gm_align_##SUFFIX(void* target, const void* source, uint8_t,           \
                                             uint16_t count, uint32_t bytes, uint8_t, uint8_t,    \
                                             uint32_t source_gap, uint32_t target_gap) {          \
    npu_ops::twin::issue("copy_ubuf_to_gm_align_" #SUFFIX, PIPE_MTE3);                            \
    npu_ops::twin::store_padded(target, source, count, bytes, source_gap, target_gap);            \
  }
NPU_OPS_TWIN_PADDED(b8, 1)
NPU_OPS_TWIN_PADDED(b16, 2)
NPU_OPS_TWIN_PADDED(b32, 4)
#undef NPU_OPS_TWIN_PADDED
