// Element types of the kernels: storage types that convert to and from float in loops that the
// compiler can vectorise. torch's BFloat16 and Half convert through branches, which prevent that.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One portable binary: the compiler emits each loop for AVX-512, AVX2 and plain x86-64, and the
// loader picks one. GCC only; Ascend hosts are mostly aarch64, where NEON is the baseline anyway.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NPU_OPS_X86_CLONES 1
#define NPU_OPS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// Attributes of two versions of one function. The loader picks the NPU_OPS_AVX2 version on machines
// with AVX2 and the fp16 conversions of x86-64-v3.
#define NPU_OPS_AVX2 __attribute__((target("arch=x86-64-v3")))
#define NPU_OPS_WITHOUT_AVX2 __attribute__((target("default")))
#else
#define NPU_OPS_CLONES
#define NPU_OPS_WITHOUT_AVX2
#endif
// A function that a cloned loop calls must be inlined into each clone to be vectorised there.
#define NPU_OPS_INLINE inline __attribute__((always_inline))

namespace npu_ops {

// Floats per explicit vector: as many as an AVX2 or NEON register holds. If accumulators are wider
// than registers, the compiler keeps them in memory, and a matrix product takes six times as long.
#if defined(__x86_64__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

NPU_OPS_INLINE float load(float value) { return value; }

NPU_OPS_INLINE float load(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

#if defined(__aarch64__)
// One instruction, which the compiler can vectorise.
NPU_OPS_INLINE float load(fp16 value) { return std::bit_cast<__fp16>(value.bits); }
#else
// Converts half to float without tables or branches: shifts the bits into place, rescales the
// exponent by a multiplication (which also makes subnormals right), then restores infinities and
// NaN. The select is between floats: GCC would narrow a select between integers to 16 bits and pack
// both values and the condition.
NPU_OPS_INLINE float load(fp16 value) {
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(shifted) * 0x1p112f;
  const float infinite = std::bit_cast<float>(shifted | 0x7f800000u);
  const float magnitude = scaled >= 0x1p16f ? infinite : scaled;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}
#endif

NPU_OPS_INLINE void store(float* out, float value) { *out = value; }

// Rounds to nearest even; a NaN becomes a quiet NaN. The select is between floats, as for fp16
// above.
NPU_OPS_INLINE void store(bf16* out, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float rounded = std::bit_cast<float>(bits + (0x7fffu + ((bits >> 16) & 1u)));
  const float quiet = std::bit_cast<float>(bits | 0x400000u);
  const float chosen = value != value ? quiet : rounded;
  out->bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(chosen) >> 16);
}

#if defined(__aarch64__)
NPU_OPS_INLINE void store(fp16* out, float value) {
  out->bits = std::bit_cast<uint16_t>(static_cast<__fp16>(value));
}
#else
// Rounds to nearest even. Small values are rounded by adding the number whose unit in the last
// place is half's smallest step. Each candidate is a float whose low bits are the bits of a half.
NPU_OPS_INLINE void store(fp16* out, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const float size = std::bit_cast<float>(magnitude);
  const uint32_t to_even = 0xfffu + ((magnitude >> 13) & 1u);
  const float normal = std::bit_cast<float>((magnitude - 0x38000000u + to_even) >> 13);
  const float subnormal = std::bit_cast<float>(std::bit_cast<uint32_t>(size + 0.5f) - 0x3f000000u);
  float result = size < 0x1p-14f ? subnormal : normal;
  result = size >= 65520.0f ? std::bit_cast<float>(0x7c00u) : result;
  result = size != size ? std::bit_cast<float>(0x7e00u) : result;
  out->bits = static_cast<uint16_t>((bits >> 16 & 0x8000u) | std::bit_cast<uint32_t>(result));
}
#endif

// Returns the value if it is kept, else 0. Masks the bits: plain x86-64 has no masked move, and a
// product of inf and 0 is NaN.
NPU_OPS_INLINE float keep_if(bool kept, float value) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & -static_cast<uint32_t>(kept));
}

}  // namespace npu_ops
