// Reads tokens of the gated delta rule's inputs, and finds where sequences begin and end.
#pragma once

#include <optional>
#include <vector>

#include "common/check.h"
#include "common/indices.h"

namespace npu_ops {

// Rows of a tensor of any float dtype, `stride` elements apart, read as fp32.
class Rows {
 public:
  Rows(const Tensor& tensor, int64_t stride)
      : data_(static_cast<const char*>(tensor.const_data_ptr())),
        dtype_(tensor.scalar_type()),
        stride_(stride) {}
  // Reads elements [begin, begin + count) of a row.
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

// The first token and the end of each sequence: from `cu_seqlens`, or `length` tokens per sequence
// without it.
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
