// Element types as the kernels see them: storage types that convert to and from float in loops the
// compiler can vectorise. torch's own BFloat16 and Half convert through branches that it cannot.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One portable binary: the compiler emits each loop for AVX-512, AVX2 and plain x86-64, and the
// loader picks. GCC only; Ascend hosts are mostly aarch64, where NEON is the baseline anyway.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NPU_OPS_X86_CLONES 1
#define NPU_OPS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NPU_OPS_CLONES
#endif
// What a cloned loop calls must be inlined into each clone to be vectorised there.
#define NPU_OPS_INLINE inline __attribute__((always_inline))

namespace npu_ops {

// Of vectors that are spelled out: those of AVX2 or NEON. A sum in longer ones than the machine has
// is kept in memory by the compiler, and a product of matrices then takes six times as long.
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

// Half to float without tables or branches: shift into place, rescale the exponent by a multiply
// (which also makes subnormals right), then restore infinities and NaN.
NPU_OPS_INLINE float load(fp16 value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t infinite = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | infinite | sign);
}

NPU_OPS_INLINE void store(float* out, float value) { *out = value; }

// Round to nearest even; a NaN stays a NaN (its payload is quieted). The choice is made between
// floats: GCC narrows a choice between words to 16 bits, and packs both of them and the condition.
NPU_OPS_INLINE void store(bf16* out, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float rounded = std::bit_cast<float>(bits + (0x7fffu + ((bits >> 16) & 1u)));
  const float quiet = std::bit_cast<float>(bits | 0x400000u);
  const float chosen = value != value ? quiet : rounded;
  out->bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(chosen) >> 16);
}

// Round to nearest even. Large values saturate to infinity through the comparison; small ones are
// rounded by adding the number whose unit in the last place is half's smallest step.
NPU_OPS_INLINE void store(fp16* out, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  out->bits = static_cast<uint16_t>(sign | result);
}

// The value, or 0. Bits and not a condition: plain x86-64 has no masked move, and 0 * inf is NaN.
NPU_OPS_INLINE float keep_if(bool kept, float value) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & -static_cast<uint32_t>(kept));
}

}  // namespace npu_ops
