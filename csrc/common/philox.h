// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and the
// dropout mask drawn from it. npu_ops/core/rng.py is the definition; this is the same in vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/memory.h"
#include "common/vec.h"

namespace npu_ops {

constexpr uint32_t kFirstFactor = 0xD2511F53u, kSecondFactor = 0xCD9E8D57u;

NPU_OPS_INLINE uint32_t high_word(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
NPU_OPS_INLINE uint32_t low_word(uint64_t x) { return static_cast<uint32_t>(x); }

NPU_OPS_INLINE void philox_round(uint32_t c[4], uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t{kFirstFactor} * c[0], p1 = uint64_t{kSecondFactor} * c[2];
  c[0] = high_word(p1) ^ c[1] ^ k0;
  c[1] = low_word(p1);
  c[2] = high_word(p0) ^ c[3] ^ k1;
  c[3] = low_word(p0);
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
      low[round] = low_word(seed) + round * 0x9E3779B9u;
      high[round] = high_word(seed) + round * 0xBB67AE85u;
    }
    for (int round = 4; round < 9; round += 2) {
      low_of_two[round] = low[round] << 32 | low[round + 1];
      high_of_two[round] = high[round] << 32 | high[round + 1];
    }
  }
  uint64_t low[10], high[10];  // wide, so that a vector instruction can take one from memory
  // Of a round and the next: with both halves of a product, one xor serves two rounds.
  uint64_t low_of_two[10], high_of_two[10];
};

// What draws: vectors that are spelled out, or those that the compiler makes.
enum class Vectors { kAny, kAvx2, kAvx512 };
inline Vectors best_vectors() {
#if NPU_OPS_X86_CLONES
  static const Vectors found = [] {
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
      return Vectors::kAvx512;
    return __builtin_cpu_supports("avx2") ? Vectors::kAvx2 : Vectors::kAny;
  }();
  return found;
#else
  return Vectors::kAny;
#endif
}

// The first three rounds of the counters (column, row, offset), which all rows share but for two
// words: a product mixes two words of four, so after two rounds
//   c0 and c1 depend on the column, c3 on the row, and c2 is a word of each, xored.
// In the third one product of two is the column's. For a row one product of six is left.
class Columns {
 public:
  // count: a multiple of 16.
  Columns(int64_t count, uint64_t offset, const Keys& keys, Vectors by = best_vectors())
      : count(count), by(by), words_(4 * count), keys_(keys) {
    const uint64_t product = uint64_t{kSecondFactor} * low_word(offset);
    first_of_row_ = high_word(product) ^ low_word(keys.low[0]);
    fill(words_.data(), count, low_word(product), high_word(offset), keys, by == Vectors::kAvx2);
  }

  // What a row adds to words of the columns.
  struct Row {
    uint32_t before, after;  // to c2 before the third round, and after it
  };
  Row row(uint32_t index) const {
    const uint64_t product = uint64_t{kFirstFactor} * (first_of_row_ ^ index);
    return {high_word(product), low_word(product)};
  }

  // Words of all columns; for AVX2, of 16 columns those of the even ones first.

  // c2 before the third round, but for the row's word.
  const uint32_t* before() const { return words_.data(); }
  // After it: c0 but for what c2's product adds, c2 but for the row's word, and c3.
  const uint32_t* c0() const { return words_.data() + count; }
  const uint32_t* c2() const { return words_.data() + 2 * count; }
  const uint32_t* c3() const { return words_.data() + 3 * count; }

  const Keys& keys() const { return keys_; }

  const int64_t count;
  const Vectors by;

 private:
  NPU_OPS_CLONES static void fill(uint32_t* words, int64_t count, uint32_t c1, uint32_t c3,
                                  const Keys& keys, bool evens_first) {
    const uint32_t k0[3] = {0, low_word(keys.low[1]), low_word(keys.low[2])};
    const uint32_t k1[3] = {low_word(keys.high[0]), low_word(keys.high[1]), low_word(keys.high[2])};
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const int64_t column = evens_first ? (j & ~15) | ((j & 7) << 1) | ((j >> 3) & 1) : j;
      const uint64_t first = uint64_t{kFirstFactor} * static_cast<uint32_t>(column);
      const uint64_t second = uint64_t{kSecondFactor} * (high_word(first) ^ c3 ^ k1[0]);
      const uint64_t third = uint64_t{kFirstFactor} * (high_word(second) ^ c1 ^ k0[1]);
      words[j] = low_word(first) ^ k1[1];
      words[count + j] = low_word(second) ^ k0[2];
      words[2 * count + j] = high_word(third) ^ k1[2];
      words[3 * count + j] = low_word(third);
    }
  }

  Lines<uint32_t> words_;
  uint32_t first_of_row_;
  Keys keys_;
};

// Memory that will be read once the draws of a row are made. Drawing touches little, so fetching
// this meanwhile is free.
struct Upcoming {
  const char* first;
  const char* second;
  int64_t bytes;

  // The share of `columns` from the one at `begin` on, of `count`.
  NPU_OPS_INLINE void fetch(int64_t begin, int64_t columns, int64_t count) const {
    const int64_t share = (bytes * columns / count + 63) / 64 * 64;
    const int64_t end = std::min(bytes, (begin / columns + 1) * share);
    for (int64_t at = begin / columns * share; at < end; at += 64) {
      __builtin_prefetch(first + at);
      if (second) __builtin_prefetch(second + at);
    }
  }
};

#if NPU_OPS_X86_CLONES
#define NPU_OPS_AVX2 __attribute__((target("arch=x86-64-v3")))
#define NPU_OPS_AVX512 __attribute__((target("arch=x86-64-v4")))

// Writes 16 draws as masks.
NPU_OPS_AVX2 NPU_OPS_INLINE void put_kept(uint16_t* keep, __m256i draws, __m256i threshold) {
  const __m256i kept = _mm256_cmpeq_epi16(_mm256_max_epu16(draws, threshold), draws);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(keep), kept);
}

// Moves the high half of each 64-bit lane to the low half. A shuffle and not a shift: the
// multiplies keep the shifter's port busy.
NPU_OPS_AVX512 NPU_OPS_INLINE __m512i high_half(__m512i v) {
  return _mm512_shuffle_epi32(v, _MM_PERM_DDBB);
}

// Counters in 64-bit lanes, those of even columns and those of odd ones: the multiply reads the low
// half of a lane only, so the high halves may hold anything and a round is six instructions. GCC
// makes 60 of the plain loop.
NPU_OPS_AVX512 static void keep_row_avx512(uint16_t* keep, const Columns& columns, uint32_t row,
                                           uint16_t threshold, Upcoming upcoming) {
  const __m512i m0 = _mm512_set1_epi64(kFirstFactor), m1 = _mm512_set1_epi64(kSecondFactor);
  const __m256i least = _mm256_set1_epi16(static_cast<int16_t>(threshold));
  const Columns::Row of_row = columns.row(row);
  const __m512i before = _mm512_set1_epi32(static_cast<int32_t>(of_row.before));
  const __m512i after = _mm512_set1_epi32(static_cast<int32_t>(of_row.after));
  const int64_t count = columns.count;
  for (int64_t j = 0; j < count; j += 16) {
    upcoming.fetch(j, 16, count);
    const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(columns.before() + j), before);
    const __m512i even[3] = {_mm512_loadu_si512(columns.c0() + j),
                             _mm512_xor_si512(_mm512_loadu_si512(columns.c2() + j), after),
                             _mm512_loadu_si512(columns.c3() + j)};
    __m512i c[2][4];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      c[odd][1] = _mm512_mul_epu32(m1, odd ? high_half(second) : second);
      const __m512i c0 = odd ? high_half(even[0]) : even[0];
      c[odd][0] = _mm512_xor_si512(high_half(c[odd][1]), c0);
      c[odd][2] = odd ? high_half(even[1]) : even[1];
      c[odd][3] = odd ? high_half(even[2]) : even[2];
    }
#pragma GCC unroll 7
    for (int round = 3; round < 10; ++round)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        __m512i* words = c[odd];
        const __m512i p0 = _mm512_mul_epu32(m0, words[0]), p1 = _mm512_mul_epu32(m1, words[2]);
        const __m512i k0 = _mm512_set1_epi64(static_cast<int64_t>(columns.keys().low[round]));
        const __m512i k1 = _mm512_set1_epi64(static_cast<int64_t>(columns.keys().high[round]));
        words[0] = _mm512_ternarylogic_epi64(high_half(p1), words[1], k0, 0x96);  // a ^ b ^ c
        words[2] = _mm512_ternarylogic_epi64(high_half(p0), words[3], k1, 0x96);
        words[1] = p1;
        words[3] = p0;
      }
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      const __m512i both = _mm512_mask_shuffle_epi32(c[0][word], 0xAAAA, c[1][word], _MM_PERM_CCAA);
      uint16_t* to = keep + 2 * word * count + j;
      put_kept(to, _mm512_cvtepi32_epi16(both), least);
      put_kept(to + count, _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)), least);
    }
  }
}

NPU_OPS_AVX2 NPU_OPS_INLINE __m256i eight(const uint32_t* words) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}

// The words of 8 columns, likewise.
NPU_OPS_AVX2 NPU_OPS_INLINE void draw_eight(const Columns& columns, int64_t first,
                                            Columns::Row of_row, __m256i words[4]) {
  const __m256i m0 = _mm256_set1_epi64x(kFirstFactor), m1 = _mm256_set1_epi64x(kSecondFactor);
  const Keys& keys = columns.keys();
  const __m256i before = _mm256_set1_epi32(static_cast<int32_t>(of_row.before));
  const __m256i after = _mm256_set1_epi32(static_cast<int32_t>(of_row.after));
  __m256i second = _mm256_xor_si256(eight(columns.before() + first), before);
  __m256i even[3] = {eight(columns.c0() + first),
                     _mm256_xor_si256(eight(columns.c2() + first), after),
                     eight(columns.c3() + first)};
  __m256i c[2][4];
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    c[odd][1] = _mm256_mul_epu32(m1, odd ? _mm256_srli_epi64(second, 32) : second);
    const __m256i c0 = odd ? _mm256_srli_epi64(even[0], 32) : even[0];
    c[odd][0] = _mm256_xor_si256(_mm256_srli_epi64(c[odd][1], 32), c0);
    c[odd][2] = odd ? _mm256_srli_epi64(even[1], 32) : even[1];
    c[odd][3] = odd ? _mm256_srli_epi64(even[2], 32) : even[2];
    c[odd][1] = _mm256_xor_si256(c[odd][1], _mm256_set1_epi64x(static_cast<int64_t>(keys.low[3])));
    c[odd][3] = _mm256_xor_si256(c[odd][3], _mm256_set1_epi64x(static_cast<int64_t>(keys.high[3])));
  }
#pragma GCC unroll 7
  for (int round = 3; round < 10; ++round)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      __m256i* of = c[odd];
      __m256i p0 = _mm256_mul_epu32(m0, of[0]), p1 = _mm256_mul_epu32(m1, of[2]);
      if (round % 2 == 0) {
        p0 =
            _mm256_xor_si256(p0, _mm256_set1_epi64x(static_cast<int64_t>(keys.high_of_two[round])));
        p1 = _mm256_xor_si256(p1, _mm256_set1_epi64x(static_cast<int64_t>(keys.low_of_two[round])));
      }
      of[0] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), of[1]);
      of[2] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), of[3]);
      of[1] = p1;
      of[3] = p0;
    }
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word)
    words[word] = _mm256_blend_epi32(c[0][word], _mm256_slli_epi64(c[1][word], 32), 0xAA);
}

NPU_OPS_AVX2 static void keep_row_avx2(uint16_t* keep, const Columns& columns, uint32_t row,
                                       uint16_t threshold, Upcoming upcoming) {
  const __m256i least = _mm256_set1_epi16(static_cast<int16_t>(threshold));
  const Columns::Row of_row = columns.row(row);
  const int64_t count = columns.count;
  for (int64_t j = 0; j < count; j += 16) {
    upcoming.fetch(j, 16, count);
    __m256i even[4], odd[4];
    draw_eight(columns, j, of_row, even);
    draw_eight(columns, j + 8, of_row, odd);
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      uint16_t* to = keep + 2 * word * count + j;
      const __m256i low = _mm256_slli_epi32(odd[word], 16),
                    high = _mm256_srli_epi32(even[word], 16);
      put_kept(to, _mm256_blend_epi16(even[word], low, 0xAA), least);
      put_kept(to + count, _mm256_blend_epi16(high, odd[word], 0xAA), least);
    }
  }
}
#endif

NPU_OPS_CLONES static void keep_row_any(uint16_t* keep, const Columns& columns, uint32_t row,
                                        uint16_t threshold) {
  const Columns::Row of_row = columns.row(row);
  const Keys& keys = columns.keys();
  const uint32_t *before = columns.before(), *c0 = columns.c0(), *c2 = columns.c2(),
                 *c3 = columns.c3();
  const int64_t count = columns.count;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    const uint64_t product = uint64_t{kSecondFactor} * (before[j] ^ of_row.before);
    uint32_t c[4] = {high_word(product) ^ c0[j], low_word(product), c2[j] ^ of_row.after, c3[j]};
#pragma GCC unroll 7
    for (int round = 3; round < 10; ++round)
      philox_round(c, low_word(keys.low[round]), low_word(keys.high[round]));
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      const auto low = static_cast<uint16_t>(c[word]), high = static_cast<uint16_t>(c[word] >> 16);
      keep[2 * word * count + j] = static_cast<uint16_t>(-(low >= threshold));
      keep[(2 * word + 1) * count + j] = static_cast<uint16_t>(-(high >= threshold));
    }
  }
}

// Which elements of a row are kept, all ones or none, in column order: keep[lane * count + j] for j
// in [0, count). Kept is what draws at least `threshold`.
inline void keep_row(uint16_t* keep, const Columns& columns, uint32_t row, uint16_t threshold,
                     Upcoming upcoming) {
#if NPU_OPS_X86_CLONES
  if (columns.by == Vectors::kAvx512)
    return keep_row_avx512(keep, columns, row, threshold, upcoming);
  if (columns.by == Vectors::kAvx2) return keep_row_avx2(keep, columns, row, threshold, upcoming);
#endif
  keep_row_any(keep, columns, row, threshold);
}

}  // namespace npu_ops
