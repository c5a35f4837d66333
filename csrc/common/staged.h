// Rows as vectorised loops take them. fp16 goes through rows of fp32: GCC 12 has no vector
// conversion of it in a cloned loop, and in integers one takes 8 or, rounded, 15 instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/vec.h"

namespace npu_ops {

#ifdef NPU_OPS_X86_CLONES
#define NPU_OPS_WITH_F16C __attribute__((target("arch=x86-64-v3")))
#define NPU_OPS_WITHOUT __attribute__((target("default")))

NPU_OPS_WITH_F16C inline void widen(const fp16* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) out[i] = load(in[i]);
}

NPU_OPS_WITH_F16C inline void narrow(const float* in, fp16* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < count; ++i) store(out + i, in[i]);
}
#else
#define NPU_OPS_WITHOUT
#endif

NPU_OPS_WITHOUT inline void widen(const fp16* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
}

NPU_OPS_WITHOUT inline void narrow(const float* in, fp16* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(out + i, in[i]);
}

// Rows in memory, a step apart.
template <class T>
struct Strided {
  NPU_OPS_INLINE T* row(int64_t index) const { return data + index * step; }
  Strided from(int64_t first) const { return {row(first), step}; }
  T* data;
  int64_t step;
};

// One thread's way to some rows of a tensor: fp16 by way of its own memory, others as they are.
template <class T>
class Staged {
 public:
  static constexpr bool kCopied = std::is_same_v<T, fp16>;
  using Element = std::conditional_t<kCopied, float, T>;

  Staged(int64_t rows, int64_t width) : memory_(kCopied ? rows * width : 0), width_(width) {}

  Strided<const Element> read(Strided<const T> from, int64_t rows) {
    if constexpr (!kCopied)
      return from;
    else {
      for (int64_t row = 0; row < rows; ++row)
        widen(from.row(row), memory_.data() + row * width_, width_);
      return {memory_.data(), width_};
    }
  }
  // One row, or a piece of it.
  const Element* read(const T* row, int64_t count) {
    if constexpr (!kCopied)
      return row;
    else {
      widen(row, memory_.data(), count);
      return memory_.data();
    }
  }

  // Where to write; `written` then brings it to its place.
  Strided<Element> to(Strided<T> rows) {
    if constexpr (kCopied)
      return {memory_.data(), width_};
    else
      return rows;
  }
  Element* to(T* row) { return to(Strided<T>{row, width_}).data; }

  void written(Strided<T> to, int64_t rows) {
    if constexpr (kCopied)
      for (int64_t row = 0; row < rows; ++row)
        narrow(memory_.data() + row * width_, to.row(row), width_);
  }
  void written(T* row, int64_t count) {
    if constexpr (kCopied) narrow(memory_.data(), row, count);
  }

 private:
  std::vector<float> memory_;
  int64_t width_;
};

// How many of `count` rows of `width`, or pieces of one row, are staged at once: of 2048 elements
// each, four rows of an op push each other out of a core's first cache. All, where none is copied.
template <class... T>
int64_t staged_at_once(int64_t count, int64_t width = 1) {
  constexpr int64_t kElements = 512;
  constexpr bool copied = (Staged<T>::kCopied || ...);
  return copied ? std::clamp<int64_t>(kElements / width, 1, count) : count;
}

// Runs body(first, count) over [begin, end), at most `most` at once.
template <class Body>
void in_blocks(int64_t begin, int64_t end, int64_t most, const Body& body) {
  for (; begin < end; begin += most) body(begin, std::min(most, end - begin));
}

}  // namespace npu_ops
