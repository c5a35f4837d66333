// Philox4x32-10 on the vector unit, for the dropout mask of csrc/common/philox.h.
//
// A vector core multiplies 32 bits by 32 and keeps the low half, so the high half comes from
// 16-bit limbs. It has no xor and no 32-bit logic: `and` and `or` act on 16-bit views, and a ^ b is
// (a | b) - (a & b).
#pragma once

#include <kernel_operator.h>

namespace npu_ops {

class Philox {
 public:
  using Words = AscendC::LocalTensor<int32_t>;
  static constexpr int32_t kBuffers = 10;  // of `count` words each, in the memory given to Init

  // `count`: Philox calls per Draw, a multiple of 64. Each call fills one element of each of the
  // four words.
  __aicore__ inline void Init(Words memory, int32_t count) {
    count_ = count;
    for (int32_t i = 0; i < 4; ++i) word_[i] = memory[i * count];
    low_half_ = memory[4 * count];
    high_ = memory[5 * count];
    for (int32_t i = 0; i < 4; ++i) limb_[i] = memory[(6 + i) * count];
    AscendC::Duplicate(low_half_, 0xFFFF, count);
  }

  // Returns word `i` of the counters that Draw encrypts. Fill all four before each Draw.
  __aicore__ inline Words counter(int32_t i) { return word_[i]; }

  __aicore__ inline void Draw(uint64_t seed) {
    auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int32_t round = 0; round < 10; ++round) {
      Round(low, high);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }

  // Writes 16 random bits, as a float, to `to` for each element of a lane (0 to 7). Call Draw
  // first.
  __aicore__ inline void Halves(AscendC::LocalTensor<float> to, int32_t lane) {
    const Words word = word_[lane / 2];
    if (lane % 2)
      ShiftDown(limb_[0], word);
    else
      And(limb_[0], word, low_half_);
    AscendC::Cast(to, limb_[0], AscendC::RoundMode::CAST_NONE, count_);
  }

  // Returns a buffer of `count` words that callers may use between one Draw and the next.
  __aicore__ inline Words scratch(int32_t i) { return limb_[1 + i]; }

 private:
  // Computes one round in place. Words stay in their buffers; the entries of word_ are rotated
  // instead.
  __aicore__ inline void Round(uint32_t low_key, uint32_t high_key) {
    High(high_, word_[0], 0xD2511F53u);
    AscendC::Muls(word_[0], word_[0], static_cast<int32_t>(0xD2511F53u), count_);
    Xor(word_[3], word_[3], high_);
    XorKey(word_[3], high_key);
    High(high_, word_[2], 0xCD9E8D57u);
    AscendC::Muls(word_[2], word_[2], static_cast<int32_t>(0xCD9E8D57u), count_);
    Xor(word_[1], word_[1], high_);
    XorKey(word_[1], low_key);
    const Words first = word_[0];
    for (int32_t i = 0; i < 3; ++i) word_[i] = word_[i + 1];
    word_[3] = first;
  }

  // Sets `to` to the high 32 bits of a * b.
  __aicore__ inline void High(Words to, Words a, uint32_t b) {
    const auto b_low = static_cast<int32_t>(b & 0xFFFF), b_high = static_cast<int32_t>(b >> 16);
    And(limb_[0], a, low_half_);
    ShiftDown(limb_[1], a);
    AscendC::Muls(limb_[2], limb_[0], b_low, count_);
    AscendC::Muls(limb_[0], limb_[0], b_high, count_);
    AscendC::Muls(limb_[3], limb_[1], b_low, count_);
    AscendC::Muls(to, limb_[1], b_high, count_);
    ShiftDown(limb_[2], limb_[2]);
    AscendC::Add(limb_[3], limb_[3], limb_[2], count_);  // middle
    And(limb_[2], limb_[3], low_half_);
    AscendC::Add(limb_[0], limb_[0], limb_[2], count_);  // cross
    ShiftDown(limb_[3], limb_[3]);
    ShiftDown(limb_[0], limb_[0]);
    AscendC::Add(to, to, limb_[3], count_);
    AscendC::Add(to, to, limb_[0], count_);
  }

  // to = a ^ b; `to` may be either.
  __aicore__ inline void Xor(Words to, Words a, Words b) {
    And(limb_[0], a, b);
    AscendC::Or(limb_[1].ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(),
                b.ReinterpretCast<uint16_t>(), 2 * count_);
    AscendC::Sub(to, limb_[1], limb_[0], count_);
  }

  __aicore__ inline void XorKey(Words to, uint32_t key) {
    AscendC::Duplicate(limb_[2], static_cast<int32_t>(key), count_);
    Xor(to, to, limb_[2]);
  }

  __aicore__ inline void And(Words to, Words a, Words b) {
    AscendC::And(to.ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(),
                 b.ReinterpretCast<uint16_t>(), 2 * count_);
  }

  // Sets each word of `to` to the high 16 bits of `from`.
  __aicore__ inline void ShiftDown(Words to, Words from) {
    AscendC::ShiftRight(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(),
                        uint32_t{16}, count_);
  }

  Words word_[4], low_half_, high_, limb_[4];
  int32_t count_;
};

}  // namespace npu_ops
