// Which memory a vector instruction accesses: CCE intrinsic guide, 6.2.1, 6.3.1.1 (strides) and
// 6.3.1.2 (masks).
#pragma once

#include <stub_def.h>  // the vendor's half and bfloat16_t

#include <algorithm>
#include <cstdint>
#include <exception>

#include "machine.h"

namespace npu_ops::twin {

constexpr int kRepeatBytes = 256;
constexpr int kBlockBytes = 32;

// An operand. A repeat has up to eight blocks of 32 bytes. Strides of repeats and of blocks are
// counted in blocks.
template <class T>
struct Operand {
  static constexpr int kPerBlock = kBlockBytes / sizeof(T);
  T* base;
  int block_stride, repeat_stride;

  T* at(int repeat, int element) const {
    const int64_t blocks =
        int64_t{repeat} * repeat_stride + int64_t{element / kPerBlock} * block_stride;
    return reinterpret_cast<T*>(reinterpret_cast<char*>(base) + blocks * kBlockBytes) +
           element % kPerBlock;
  }
};

// The repeats of an instruction and the elements of each, under the mask. In counter mode the mask
// says how many elements there are, and the instruction's own count is ignored.
class Extent {
 public:
  Extent(int repeats, int per_repeat)
      : mask_(registers().mask), per_repeat_(per_repeat), repeats_(repeats) {
    if (mask_.counts) repeats_ = static_cast<int>((mask_.low + per_repeat - 1) / per_repeat);
    while (leading_ < per_repeat && mask_.has(leading_)) ++leading_;
    for (int i = leading_; i < per_repeat; ++i) scattered_ |= mask_.has(i);
  }

  // Returns the Extent of an instruction that keeps its own repeat count in counter mode. The mask
  // is the number of elements of each repeat, which may exceed 256 bytes.
  static Extent of_each_repeat(int repeats, int per_repeat) {
    Extent extent(repeats, per_repeat);
    if (!extent.mask_.counts) return extent;
    extent.mask_.counts = false;
    extent.repeats_ = repeats;
    extent.per_repeat_ = extent.leading_ = static_cast<int>(extent.mask_.low);
    extent.scattered_ = false;
    return extent;
  }

  int repeats() const { return repeats_; }
  int per_repeat() const { return per_repeat_; }

  bool has(int repeat, int element) const {
    if (!mask_.counts) return mask_.has(element);
    return static_cast<uint64_t>(repeat) * per_repeat_ + element < mask_.low;
  }

  // Returns the number of active elements of a repeat if they are its first ones, else -1.
  int leading(int repeat) const {
    if (!mask_.counts) return scattered_ ? -1 : leading_;
    const uint64_t left = mask_.low - static_cast<uint64_t>(repeat) * per_repeat_;
    return static_cast<int>(std::min<uint64_t>(left, per_repeat_));
  }

  template <class F>
  void each(F f) const {
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      const int first = leading(repeat);
      for (int element = 0; element < (first < 0 ? per_repeat_ : first); ++element)
        if (first >= 0 || has(repeat, element)) f(repeat, element);
    }
  }

 private:
  Mask mask_;
  int per_repeat_, repeats_;
  int leading_ = 0;
  bool scattered_ = false;
};

// Merges an instruction's accesses into contiguous runs.
class Runs {
 public:
  explicit Runs(Access access) : access_(access) {}
  ~Runs() noexcept(false) {
    if (!std::uncaught_exceptions()) flush();
  }

  void add(const void* at, size_t bytes) {
    const char* next = static_cast<const char*>(at);
    if (next != end_) {
      flush();
      begin_ = next;
    }
    end_ = next + bytes;
  }

 private:
  void flush() {
    if (begin_) touch(access_, begin_, end_ - begin_);
  }
  Access access_;
  const char *begin_ = nullptr, *end_ = nullptr;
};

// Reports an instruction's accesses to an operand to the machine, which checks them.
template <class T>
void touch(Access access, const Operand<T>& operand, const Extent& extent) {
  constexpr int kBlockElements = Operand<T>::kPerBlock;
  Runs runs(access);
  for (int repeat = 0; repeat < extent.repeats(); ++repeat) {
    const int first = extent.leading(repeat);
    for (int e = 0; e < first; e += kBlockElements)
      runs.add(operand.at(repeat, e), std::min(kBlockElements, first - e) * sizeof(T));
    for (int e = 0; first < 0 && e < extent.per_repeat(); ++e)
      if (extent.has(repeat, e)) runs.add(operand.at(repeat, e), sizeof(T));
  }
}

template <class... T>
constexpr int per_repeat() {
  return kRepeatBytes / static_cast<int>(std::max({sizeof(T)...}));
}

}  // namespace npu_ops::twin
