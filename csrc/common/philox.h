// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and the
// dropout mask drawn from it. npu_ops/core/rng.py is the definition; this is the same in vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/vec.h"

namespace npu_ops {

NPU_OPS_INLINE void philox_round(uint32_t c[4], uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
  const uint32_t c0 = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
  const uint32_t c2 = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
  c[1] = static_cast<uint32_t>(p1);
  c[3] = static_cast<uint32_t>(p0);
  c[0] = c0;
  c[2] = c2;
}

// A row is cut into 8 lanes of this many columns. One Philox call per column of a lane serves all
// eight with 16 bits each. A multiple of 16 keeps vectors whole.
constexpr int64_t kDrawLanes = 8;
inline int64_t lane_width(int64_t width) {
  return ((width + kDrawLanes - 1) / kDrawLanes + 15) / 16 * 16;
}

// The ten round keys.
struct Keys {
  explicit Keys(uint64_t seed) {
    for (uint32_t round = 0; round < 10; ++round) {
      low[round] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      high[round] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
  }
  uint64_t low[10], high[10];  // wide, so that a vector instruction can take one from memory
};

// Memory that will be read once the draws of a row are made. Drawing touches none, so fetching this
// meanwhile is free.
struct Upcoming {
  const char* first;
  const char* second;
  int64_t bytes;

  NPU_OPS_INLINE void fetch(int64_t begin, int64_t end) const {
    for (; begin < std::min(end, bytes); begin += 64) {
      __builtin_prefetch(first + begin);
      if (second) __builtin_prefetch(second + begin);
    }
  }
};

#if NPU_OPS_X86_CLONES
#define NPU_OPS_AVX2 __attribute__((target("arch=x86-64-v3")))
#define NPU_OPS_AVX512 __attribute__((target("arch=x86-64-v4")))

// Moves the high half of each 64-bit lane to the low half. A shuffle and not a shift: the
// multiplies keep the shifter's port busy.
NPU_OPS_AVX512 NPU_OPS_INLINE __m512i high_half(__m512i v) {
  return _mm512_shuffle_epi32(v, _MM_PERM_DDBB);
}

// Eight counters in 64-bit lanes: the multiply reads the low half of a lane only, so the high
// halves may hold anything and a round is six instructions. GCC makes 60 of the plain loop.
NPU_OPS_AVX512 static void draw_row_avx512(uint16_t* draws, int64_t count, uint32_t row,
                                           uint64_t offset, const Keys& keys, Upcoming upcoming) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  // From (a, b) in each lane, halves first of all a, then of all b: 16-bit words 0 4 8 .. | 1 5 ..
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i % 8 * 4 + i / 8);
  const __m512i by_half = _mm512_load_si512(order);
  __m512i column = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const int64_t share = (upcoming.bytes * 8 / count + 63) / 64 * 64;
  for (int64_t j = 0; j < count; j += 8, column = _mm512_add_epi64(column, _mm512_set1_epi64(8))) {
    upcoming.fetch(j / 8 * share, (j / 8 + 1) * share);
    __m512i c0 = column, c1 = _mm512_set1_epi64(row);
    __m512i c2 = _mm512_set1_epi64(static_cast<uint32_t>(offset));
    __m512i c3 = _mm512_set1_epi64(static_cast<int64_t>(offset >> 32));
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m512i p0 = _mm512_mul_epu32(m0, c0), p1 = _mm512_mul_epu32(m1, c2);
      const __m512i k0 = _mm512_set1_epi64(keys.low[round]);
      const __m512i k1 = _mm512_set1_epi64(keys.high[round]);
      c0 = _mm512_ternarylogic_epi64(high_half(p1), c1, k0, 0x96);  // a ^ b ^ c
      c2 = _mm512_ternarylogic_epi64(high_half(p0), c3, k1, 0x96);
      c1 = p1;
      c3 = p0;
    }
    const __m512i pairs[2] = {_mm512_mask_shuffle_epi32(c0, 0xAAAA, c1, _MM_PERM_CCAA),
                              _mm512_mask_shuffle_epi32(c2, 0xAAAA, c3, _MM_PERM_CCAA)};
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m512i halves = _mm512_permutexvar_epi16(by_half, pairs[pair]);
      uint16_t* to = draws + 4 * pair * count + j;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(halves));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + count),
                       _mm512_extracti32x4_epi32(halves, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * count),
                       _mm512_extracti32x4_epi32(halves, 2));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 3 * count),
                       _mm512_extracti32x4_epi32(halves, 3));
    }
  }
}

// Four counters, likewise.
NPU_OPS_AVX2 static void draw_row_avx2(uint16_t* draws, int64_t count, uint32_t row,
                                       uint64_t offset, const Keys& keys, Upcoming upcoming) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  // From (a, b) in each lane: the halves of a 128-bit lane's two counters next to each other.
  const __m256i by_half = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const int64_t share = (upcoming.bytes * 8 / count + 63) / 64 * 64;
  for (int64_t j = 0; j < count; j += 8) {
    upcoming.fetch(j / 8 * share, (j / 8 + 1) * share);
    __m256i c0[2], c1[2], c2[2], c3[2];  // two chains: one waits for its products
    for (int half = 0; half < 2; ++half) {
      const int64_t first = j + 4 * half;
      c0[half] = _mm256_setr_epi64x(first, first + 1, first + 2, first + 3);
      c1[half] = _mm256_set1_epi64x(row);
      c2[half] = _mm256_set1_epi64x(static_cast<uint32_t>(offset));
      c3[half] = _mm256_set1_epi64x(static_cast<int64_t>(offset >> 32));
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i p0 = _mm256_mul_epu32(m0, c0[half]), p1 = _mm256_mul_epu32(m1, c2[half]);
        const __m256i k0 = _mm256_set1_epi64x(static_cast<int64_t>(keys.low[round]));
        const __m256i k1 = _mm256_set1_epi64x(static_cast<int64_t>(keys.high[round]));
        c0[half] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[half], k0));
        c2[half] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[half], k1));
        c1[half] = p1;
        c3[half] = p0;
      }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i pairs[2] = {
          _mm256_blend_epi32(c0[half], _mm256_slli_epi64(c1[half], 32), 0xAA),
          _mm256_blend_epi32(c2[half], _mm256_slli_epi64(c3[half], 32), 0xAA)};
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m256i halves =
            _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(pairs[pair], by_half), together);
        uint16_t* to = draws + 4 * pair * count + j + 4 * half;
        const __m128i words[2] = {_mm256_castsi256_si128(halves),
                                  _mm256_extracti128_si256(halves, 1)};
        for (int word = 0; word < 2; ++word, to += 2 * count) {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(to), words[word]);
          _mm_storeh_pd(reinterpret_cast<double*>(to + count), _mm_castsi128_pd(words[word]));
        }
      }
    }
  }
}
#endif

NPU_OPS_CLONES static void draw_row_any(uint16_t* draws, int64_t count, uint32_t row,
                                        uint64_t offset, const Keys& keys) {
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    uint32_t c[4] = {static_cast<uint32_t>(j), row, static_cast<uint32_t>(offset),
                     static_cast<uint32_t>(offset >> 32)};
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round)
      philox_round(c, static_cast<uint32_t>(keys.low[round]),
                   static_cast<uint32_t>(keys.high[round]));
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      draws[(2 * word) * count + j] = static_cast<uint16_t>(c[word]);
      draws[(2 * word + 1) * count + j] = static_cast<uint16_t>(c[word] >> 16);
    }
  }
}

// The 16-bit draws of one row in column order: draws[lane * count + j] for j in [0, count), count a
// multiple of 16.
inline void draw_row(uint16_t* draws, int64_t count, uint32_t row, uint64_t offset,
                     const Keys& keys, Upcoming upcoming) {
#if NPU_OPS_X86_CLONES
  static const bool avx512 =
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  if (avx512) return draw_row_avx512(draws, count, row, offset, keys, upcoming);
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return draw_row_avx2(draws, count, row, offset, keys, upcoming);
#endif
  draw_row_any(draws, count, row, offset, keys);
}

}  // namespace npu_ops
