// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and the
// dropout mask drawn from it. The reference is npu_ops/core/rng.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/vec.h"

namespace npu_ops {

constexpr uint32_t kFirstFactor = 0xD2511F53u, kSecondFactor = 0xCD9E8D57u;

// A row is cut into 8 lanes of lane_width columns, a multiple of 16, so lanes are whole vectors.
// One Philox call returns 128 random bits: 16 bits for the same column of each of the 8 lanes.
constexpr int64_t kDrawLanes = 8;
inline int64_t lane_width(int64_t width) {
  return ((width + kDrawLanes - 1) / kDrawLanes + 15) / 16 * 16;
}

NPU_OPS_INLINE uint32_t high_of_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}

// Philox calls for the counters (column, row, offset) of `count` columns. A round multiplies only
// two of the four words. So after two rounds c0 and c1 depend on the column, c3 on the row, and c2
// is the xor of a column's word and a row's word. The constructor computes the words that depend on
// the column, once for all rows.
class Philox {
 public:
  Philox(uint64_t seed, uint64_t offset, int64_t count)
      : offset_(static_cast<uint32_t>(offset)), count_(count), words_(4 * count) {
    for (uint32_t round = 0; round < 10; ++round) {
      low_[round] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      high_[round] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
    share(low_, high_, kSecondFactor * offset_, static_cast<uint32_t>(offset >> 32), count,
          words_.data());
  }

  // Writes the mask of a row to keep[lane * count + column]: all ones if the element is kept, i.e.
  // its draw is at least `threshold`, else 0.
  void keep_row(uint32_t row, uint16_t threshold, uint16_t* keep) const {
    const uint32_t own = high_of_product(kSecondFactor, offset_) ^ low_[0] ^ row;
    uint32_t c[4][kPiece];
    for (int64_t at = 0; at < count_; at += kPiece) {
      const int64_t count = std::min(kPiece, count_ - at);
      third_round(words_.data() + at, count_, high_of_product(kFirstFactor, own),
                  kFirstFactor * own, c, count);
      more_rounds(low_, high_, c, count);
      masks_of(c, threshold, keep + at, count_, count);
    }
  }

 private:
  static constexpr int64_t kPiece = 128;  // columns whose words fit in the L1 cache

  // Writes four words per column: the column's part of c2 before the third round, and of c0, c2 and
  // c3 after it.
  NPU_OPS_CLONES static void share(const uint32_t* low, const uint32_t* high, uint32_t c1,
                                   uint32_t c3, int64_t count, uint32_t* words) {
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const auto column = static_cast<uint32_t>(j);
      const uint32_t second = high_of_product(kFirstFactor, column) ^ c3 ^ high[0];
      const uint32_t third = high_of_product(kSecondFactor, second) ^ c1 ^ low[1];
      words[j] = (kFirstFactor * column) ^ high[1];
      words[count + j] = (kSecondFactor * second) ^ low[2];
      words[2 * count + j] = high_of_product(kFirstFactor, third) ^ high[2];
      words[3 * count + j] = kFirstFactor * third;
    }
  }

  // before, after: the row's part of c2 before and after the third round.
  NPU_OPS_CLONES static void third_round(const uint32_t* words, int64_t step, uint32_t before,
                                         uint32_t after, uint32_t (*c)[kPiece], int64_t count) {
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t second = words[j] ^ before;
      c[0][j] = high_of_product(kSecondFactor, second) ^ words[step + j];
      c[1][j] = kSecondFactor * second;
      c[2][j] = words[2 * step + j] ^ after;
      c[3][j] = words[3 * step + j];
    }
  }

  NPU_OPS_WITHOUT_AVX2 static void more_rounds(const uint32_t* low, const uint32_t* high,
                                               uint32_t (*c)[kPiece], int64_t count) {
    for (int round = 3; round < 10; ++round) {
      const uint32_t key0 = low[round], key1 = high[round];
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t first = c[0][j], second = c[2][j];
        c[0][j] = high_of_product(kSecondFactor, second) ^ c[1][j] ^ key0;
        c[1][j] = kSecondFactor * second;
        c[2][j] = high_of_product(kFirstFactor, first) ^ c[3][j] ^ key1;
        c[3][j] = kFirstFactor * first;
      }
    }
  }

#ifdef NPU_OPS_X86_CLONES
  // The same rounds in AVX2. `_mm256_mul_epu32` multiplies only the low half of each 64-bit lane,
  // so even and odd columns are in separate vectors. GCC compiles the loop above to shuffles, with
  // which dropout takes 1.7 times as long. Remove when GCC multiplies like this by itself.
  NPU_OPS_AVX2 static void more_rounds(const uint32_t* low, const uint32_t* high,
                                       uint32_t (*c)[kPiece], int64_t count) {
    const __m256i first = _mm256_set1_epi64x(kFirstFactor);
    const __m256i second = _mm256_set1_epi64x(kSecondFactor);
    for (int64_t j = 0; j < count; j += 8) {
      __m256i w[2][4];
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) {
        w[0][word] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c[word] + j));
        w[1][word] = _mm256_srli_epi64(w[0][word], 32);
      }
#pragma GCC unroll 7
      for (int round = 3; round < 10; ++round)
#pragma GCC unroll 2
        for (__m256i* of : {w[0], w[1]}) {
          const __m256i p0 = _mm256_mul_epu32(first, of[0]), p1 = _mm256_mul_epu32(second, of[2]);
          of[0] =
              _mm256_srli_epi64(p1, 32) ^ of[1] ^ _mm256_set1_epi32(static_cast<int>(low[round]));
          of[2] =
              _mm256_srli_epi64(p0, 32) ^ of[3] ^ _mm256_set1_epi32(static_cast<int>(high[round]));
          of[1] = p1;
          of[3] = p0;
        }
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word)
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(c[word] + j),
            _mm256_blend_epi32(w[0][word], _mm256_slli_epi64(w[1][word], 32), 0xAA));
    }
  }
#endif

  NPU_OPS_CLONES static void masks_of(const uint32_t (*c)[kPiece], uint16_t threshold,
                                      uint16_t* keep, int64_t step, int64_t count) {
    for (int64_t word = 0; word < 4; ++word) {
      uint16_t *lower = keep + 2 * word * step, *upper = lower + step;
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t drawn = c[word][j];
        lower[j] = static_cast<uint16_t>(-(static_cast<uint16_t>(drawn) >= threshold));
        upper[j] = static_cast<uint16_t>(-(static_cast<uint16_t>(drawn >> 16) >= threshold));
      }
    }
  }

  uint32_t low_[10], high_[10], offset_;
  int64_t count_;
  std::vector<uint32_t> words_;
};

}  // namespace npu_ops
