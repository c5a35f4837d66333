// Converts rows of any type to fp32 and back. On x86-64, intrinsics convert fp16: GCC 12 does not
// emit these vector instructions by itself. They take a fifth of the time of the code in vec.h.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/vec.h"

namespace npu_ops {

template <class T>
NPU_OPS_CLONES void widen(const T* in, float* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
}

template <class T>
NPU_OPS_CLONES void narrow(const float* in, T* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) store(out + i, in[i]);
}

#ifdef NPU_OPS_X86_CLONES
NPU_OPS_AVX2 inline void widen(const fp16* in, float* out, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  for (; i < count; ++i) out[i] = load(in[i]);
}

NPU_OPS_AVX2 inline void narrow(const float* in, fp16* out, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) store(out + i, in[i]);
}

NPU_OPS_WITHOUT_AVX2 inline void widen(const fp16* in, float* out, int64_t count) {
  widen<fp16>(in, out, count);
}

NPU_OPS_WITHOUT_AVX2 inline void narrow(const float* in, fp16* out, int64_t count) {
  narrow<fp16>(in, out, count);
}
#endif

// One thread's access to rows of a tensor. With GCC on x86-64, it converts fp16 rows to and from an
// fp32 buffer, so that loops work on fp32. Otherwise it returns the rows themselves.
template <class T>
class Row {
 public:
#ifdef NPU_OPS_X86_CLONES
  static constexpr bool kCopied = std::is_same_v<T, fp16>;
#else
  static constexpr bool kCopied = false;
#endif
  using Element = std::conditional_t<kCopied, float, T>;

  explicit Row(int64_t width) : memory_(kCopied ? width : 0) {}

  const Element* read(const T* row, int64_t count) {
    if constexpr (!kCopied)
      return row;
    else {
      widen(row, memory_.data(), count);
      return memory_.data();
    }
  }
  // Returns the memory to write a row to. Call `written` afterwards: it converts an fp32 row.
  Element* to(T* row) {
    if constexpr (kCopied)
      return memory_.data();
    else
      return row;
  }
  void written(T* row, int64_t count) {
    if constexpr (kCopied) narrow(memory_.data(), row, count);
  }

 private:
  std::vector<Element> memory_;
};

}  // namespace npu_ops
