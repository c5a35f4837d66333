// The gated delta rule on blocks of a state: kBlock value columns, which no other column knows of.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/indices.h"
#include "common/lanes.h"
#include "common/parallel.h"

namespace npu_ops {

// Of a state: rows of kBlock, of which kStrip stay in registers while all keys are walked through.
constexpr int64_t kBlock = 64;
constexpr int kStripParts = 4;
constexpr int64_t kStrip = kStripParts * kFloats;

// One token of one head and block of values, in fp32; what lies beyond the last value is 0.
struct Token {
  Token from(int64_t value) const {
    return {q, k, key_decay, v + value, beta + value, value_decay + value};
  }
  const float *q, *k, *key_decay;       // [keys]; q is scaled
  const float *v, *beta, *value_decay;  // [kBlock]
};

NPU_OPS_INLINE void advance_strip(float* state, int64_t keys, Token token, float* out) {
  Lanes recalled[kStripParts] = {}, result[kStripParts] = {}, change[kStripParts];
  for (int64_t i = 0; i < keys; ++i) {
    const float weight = token.key_decay[i] * token.k[i];
    for (int j = 0; j < kStripParts; ++j)
      recalled[j] += lanes(state + i * kBlock + j * kFloats) * weight;
  }
  for (int j = 0; j < kStripParts; ++j) {
    const int at = j * kFloats;
    const Lanes error = lanes(token.v + at) - recalled[j] * lanes(token.value_decay + at);
    change[j] = lanes(token.beta + at) * error;
  }
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < kStripParts; ++j) {
      Lanes& row = lanes(state + i * kBlock + j * kFloats);
      const Lanes decay = lanes(token.value_decay + j * kFloats) * token.key_decay[i];
      const Lanes moved = row * decay + change[j] * token.k[i];
      result[j] += moved * token.q[i];
      row = moved;
    }
  }
  for (int j = 0; j < kStripParts; ++j) lanes(out + j * kFloats) = result[j];
}

// Decays the state [keys, kBlock], moves what it recalls for k towards v, and reads it with q.
static NPU_OPS_CLONES void advance(float* state, int64_t keys, Token token, float* out) {
  for (int64_t at = 0; at < kBlock; at += kStrip)
    advance_strip(state + at, keys, token.from(at), out + at);
}

// Rows of a tensor of any float dtype, `stride` elements apart, read as fp32.
class Rows {
 public:
  Rows(const Tensor& tensor, int64_t stride)
      : data_(static_cast<const char*>(tensor.const_data_ptr())),
        dtype_(tensor.scalar_type()),
        stride_(stride) {}
  // Elements [begin, begin + count) of a row.
  void read(int64_t row, int64_t begin, int64_t count, float* out) const {
    const int64_t at = row * stride_ + begin;
    dispatch(dtype_, "dtype", [&]<class T>(T*) {
      const T* from = reinterpret_cast<const T*>(data_) + at;
      for (int64_t i = 0; i < count; ++i) out[i] = load(from[i]);
    });
  }
  float one(int64_t row, int64_t at = 0) const {
    float value;
    read(row, at, 1, &value);
    return value;
  }

 private:
  const char* data_;
  ScalarType dtype_;
  int64_t stride_;
};

// Copies between a state in memory and a block [keys, kBlock] of its values from `begin` on.
struct StateLayout {
  int64_t keys, values;
  bool v_first;
  int64_t at(int64_t key, int64_t value) const {
    return v_first ? value * keys + key : key * values + value;
  }
  void to_block(const float* state, int64_t begin, float* block) const {
    const int64_t count = std::min(kBlock, values - begin);
    std::fill(block, block + keys * kBlock, 0.0f);
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < count; ++j) block[i * kBlock + j] = state[at(i, begin + j)];
  }
  void from_block(const float* block, int64_t begin, float* state) const {
    const int64_t count = std::min(kBlock, values - begin);
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < count; ++j) state[at(i, begin + j)] = block[i * kBlock + j];
  }
};

// Where sequence n begins and ends in the tokens: by `cu_seqlens`, or all have `length` tokens.
class Spans {
 public:
  Spans(const std::optional<Tensor>& cu_seqlens, int64_t batch, int64_t length, int64_t tokens) {
    if (cu_seqlens) {
      starts_ = starts_of("cu_seqlens", *cu_seqlens, tokens);
      return;
    }
    for (int64_t n = 0; n <= batch; ++n) starts_.push_back(n * length);
  }
  int64_t count() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t begin(int64_t n) const { return starts_[n]; }
  int64_t end(int64_t n) const { return starts_[n + 1]; }

 private:
  std::vector<int64_t> starts_;
};

}  // namespace npu_ops
