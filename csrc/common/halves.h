// Rows of fp16, by the machine's own conversion, in vectors as long as the loops that read and
// wrote them have: memory is not read in one piece that was just written in two. GCC 12 has no
// vector conversion of it in a cloned loop, and in integers one takes 8 or, rounded, 15
// instructions.
#pragma once

#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

#ifdef NPU_OPS_X86_CLONES
#define NPU_OPS_WITH_F16C __attribute__((target("arch=x86-64-v3")))
#define NPU_OPS_WITH_F16C_LONG __attribute__((target("arch=x86-64-v4")))
#define NPU_OPS_WITHOUT __attribute__((target("default")))

NPU_OPS_WITH_F16C NPU_OPS_INLINE __m256 eight(const fp16* in) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

NPU_OPS_WITH_F16C NPU_OPS_INLINE void put_eight(fp16* out, __m256 values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

NPU_OPS_WITH_F16C_LONG NPU_OPS_INLINE __m512 sixteen(const fp16* in) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}

NPU_OPS_WITH_F16C_LONG NPU_OPS_INLINE void put_sixteen(fp16* out, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

NPU_OPS_WITH_F16C NPU_OPS_INLINE void widen_eights(const fp16* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, eight(in + i));
  for (; i < count; ++i) out[i] = load(in[i]);
}

NPU_OPS_WITH_F16C NPU_OPS_INLINE void narrow_eights(const float* in, fp16* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) put_eight(out + i, _mm256_loadu_ps(in + i));
  for (; i < count; ++i) store(out + i, in[i]);
}

NPU_OPS_WITH_F16C inline void widen(const fp16* in, float* out, int64_t count) {
  widen_eights(in, out, count);
}

NPU_OPS_WITH_F16C inline void narrow(const float* in, fp16* out, int64_t count) {
  narrow_eights(in, out, count);
}

NPU_OPS_WITH_F16C_LONG inline void widen(const fp16* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(out + i, sixteen(in + i));
  widen_eights(in + i, out + i, count - i);
}

NPU_OPS_WITH_F16C_LONG inline void narrow(const float* in, fp16* out, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) put_sixteen(out + i, _mm512_loadu_ps(in + i));
  narrow_eights(in + i, out + i, count - i);
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

}  // namespace npu_ops
