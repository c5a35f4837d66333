// Pages, and lines of a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace npu_ops {

// Asks for huge pages under an output that is about to be written. torch takes such memory fresh
// from the system each time, and half of the time of a memory-bound kernel is faulting 4 KiB pages.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthwhile = int64_t{4} << 20, kPage = 4096;
  if (bytes < kWorthwhile) return;
  const auto begin = (reinterpret_cast<intptr_t>(data) + kPage - 1) & -kPage;
  const auto end = (reinterpret_cast<intptr_t>(data) + bytes) & -kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: it may be refused
#endif
}

// Memory from the start of a line on. A vector as long as a line costs twice where it lies across
// two, and where a heap begins an array changes from one process to the next.
template <class T>
struct InLines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  InLines() = default;
  template <class U>
  InLines(InLines<U>) {}
  T* allocate(size_t count) { return static_cast<T*>(operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { operator delete(memory, kLine); }
  friend bool operator==(InLines, InLines) { return true; }
};

// A thread's memory for rows.
template <class T>
using Lines = std::vector<T, InLines<T>>;

}  // namespace npu_ops
