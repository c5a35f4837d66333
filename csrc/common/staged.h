// Rows as vectorised loops take them. fp16 goes through rows of fp32, for it is not converted in
// such a loop (halves.h); others as they are, or one behind the other where a loop wants that.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/halves.h"
#include "common/memory.h"

namespace npu_ops {

// Rows in memory, a step apart.
template <class T>
struct Strided {
  NPU_OPS_INLINE T* row(int64_t index) const { return data + index * step; }
  Strided from(int64_t first) const { return {row(first), step}; }
  T* data;
  int64_t step;
};

// Of rows of a few elements, eight bytes at once: a call of memcpy for each would take longer.
template <class T>
NPU_OPS_INLINE void copy_few(const T* in, T* out, int64_t count) {
  constexpr int64_t kStep = 8 / sizeof(T);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) __builtin_memcpy(out + i, in + i, 8);
  for (; i < count; ++i) out[i] = in[i];
}

// One thread's way to some rows of a tensor: fp16 by way of its own memory, others as they are, or
// also by way of it.
template <class T>
class Staged {
 public:
  static constexpr bool kCopied = std::is_same_v<T, fp16>;
  using Element = std::conditional_t<kCopied, float, T>;

  Staged(int64_t rows, int64_t width, bool copied = kCopied)
      : copied_(kCopied || copied), memory_(copied_ ? rows * width : 0), width_(width) {}

  Strided<const Element> read(Strided<const T> from, int64_t rows) {
    if constexpr (!kCopied)
      if (!copied_) return from;
    for (int64_t row = 0; row < rows; ++row) {
      Element* to = memory_.data() + row * width_;
      if constexpr (kCopied)
        widen(from.row(row), to, width_);
      else
        copy_few(from.row(row), to, width_);
    }
    return {memory_.data(), width_};
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
    if constexpr (!kCopied)
      if (!copied_) return rows;
    return {memory_.data(), width_};
  }
  Element* to(T* row) { return to(Strided<T>{row, width_}).data; }

  void written(Strided<T> to, int64_t rows) {
    if (!copied_) return;
    for (int64_t row = 0; row < rows; ++row) {
      const Element* from = memory_.data() + row * width_;
      if constexpr (kCopied)
        narrow(from, to.row(row), width_);
      else
        copy_few(from, to.row(row), width_);
    }
  }
  void written(T* row, int64_t count) {
    if constexpr (kCopied) narrow(memory_.data(), row, count);
  }

 private:
  bool copied_;
  Lines<Element> memory_;
  int64_t width_;
};

// How many of `count` rows of `width`, or pieces of one row, are staged at once: of 2048 elements
// each, four rows of an op push each other out of a core's first cache. All, where none is copied.
template <class... T>
int64_t staged_at_once(int64_t count, int64_t width = 1, bool copied = false) {
  constexpr int64_t kElements = 512;
  return copied || (Staged<T>::kCopied || ...) ? std::clamp<int64_t>(kElements / width, 1, count)
                                               : count;
}

// Runs body(first, count) over [begin, end), at most `most` at once.
template <class Body>
void in_blocks(int64_t begin, int64_t end, int64_t most, const Body& body) {
  for (; begin < end; begin += most) body(begin, std::min(most, end - begin));
}

}  // namespace npu_ops
