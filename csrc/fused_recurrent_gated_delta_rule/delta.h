// The gated delta rule on blocks of a state: kBlock value columns, which no other column knows of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/indices.h"
#include "common/parallel.h"

namespace npu_ops {

// What one instruction adds where there is AVX-512; less able targets take it in parts. Sums of
// plain loops would not be reordered, so they would not be vectorised.
typedef float Lanes __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16, kParts = 4, kBlock = kLanes * kParts;

NPU_OPS_INLINE void read(const float* from, Lanes& to) { std::memcpy(&to, from, sizeof to); }
NPU_OPS_INLINE void write(float* to, const Lanes& from) { std::memcpy(to, &from, sizeof from); }

NPU_OPS_INLINE float sum(const Lanes& x) {
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// One token of one head and block of values, in fp32; what lies beyond the last value is 0.
struct Token {
  const float *q, *k, *key_decay;       // [keys]; q is scaled
  const float *v, *beta, *value_decay;  // [kBlock]
};

// Decays the state [keys, kBlock], moves what it recalls for k towards v, and reads it with q.
static NPU_OPS_CLONES void advance(float* state, int64_t keys, Token token, float* out) {
  Lanes recalled[kParts] = {}, result[kParts] = {}, decay[kParts], change[kParts];
  for (int64_t j = 0; j < kParts; ++j) read(token.value_decay + j * kLanes, decay[j]);
  for (int64_t i = 0; i < keys; ++i) {
    const float weight = token.key_decay[i] * token.k[i];
    for (int64_t j = 0; j < kParts; ++j) {
      Lanes row;
      read(state + i * kBlock + j * kLanes, row);
      recalled[j] += row * weight;
    }
  }
  for (int64_t j = 0; j < kParts; ++j) {
    Lanes v, beta;
    read(token.v + j * kLanes, v);
    read(token.beta + j * kLanes, beta);
    change[j] = beta * (v - recalled[j] * decay[j]);
  }
  for (int64_t i = 0; i < keys; ++i) {
    for (int64_t j = 0; j < kParts; ++j) {
      Lanes row;
      read(state + i * kBlock + j * kLanes, row);
      row = row * (decay[j] * token.key_decay[i]) + change[j] * token.k[i];
      result[j] += row * token.q[i];
      write(state + i * kBlock + j * kLanes, row);
    }
  }
  for (int64_t j = 0; j < kParts; ++j) write(out + j * kLanes, result[j]);
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
  Spans(const std::optional<Tensor>& cu_seqlens, int64_t batch, int64_t length, int64_t tokens,
        Ends ends) {
    if (cu_seqlens) {
      starts_ = starts_of("cu_seqlens", *cu_seqlens, tokens, ends);
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
