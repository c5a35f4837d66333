// Pages.
#pragma once

#include <cstdint>

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

}  // namespace npu_ops
